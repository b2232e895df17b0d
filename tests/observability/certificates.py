"""Certificates of a cluster on loopback, made with openssl: what section tls of the configuration names."""

import os
import subprocess

EXTENSIONS = "subjectAltName=IP:127.0.0.1\nkeyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth,clientAuth\n"


class Authority:
    def __init__(self, directory):
        self.directory = directory
        directory.mkdir()
        (directory / "extensions").write_text(EXTENSIONS)
        self.openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "60", "-subj",
                     "/CN=conclave-ca", "-keyout", "ca.key", "-out", "ca.crt")

    def openssl(self, *words):
        subprocess.run(["openssl", *words], cwd=self.directory, capture_output=True, check=True)

    def issue(self, name, days):
        """Makes name.key, unless it is there, and name.crt for so many days from now; the file changes at once."""
        if not (self.directory / f"{name}.key").exists():
            self.openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN=conclave-{name}",
                         "-keyout", f"{name}.key", "-out", f"{name}.csr")
        self.openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", str(days),
                     "-extfile", "extensions", "-out", f"{name}.new")
        os.replace(self.directory / f"{name}.new", self.directory / f"{name}.crt")

    def spoil(self, name):
        (self.directory / f"{name}.new").write_text("this is no certificate\n")
        os.replace(self.directory / f"{name}.new", self.directory / f"{name}.crt")

    def settings(self, name):
        return [f"tls.ca_file={self.directory / 'ca.crt'}", f"tls.cert_file={self.directory / f'{name}.crt'}",
                f"tls.key_file={self.directory / f'{name}.key'}", "tls.reload_interval_s=1"]
