// Authorities and certificates for tests, made on the spot: no key is ever committed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "libs/tls/options.h"

namespace conclave::tls {

// What a certificate says.
struct Wish {
  std::string name = "node";
  std::vector<std::string> dns = {"localhost"};
  std::vector<std::string> addresses = {"127.0.0.1"};
  std::vector<std::string> uris;
  int64_t begins_s = -3600;  // from now
  int64_t ends_s = 24 * 3600;
  std::string usage = "serverAuth,clientAuth";
  bool authority = false;
};

// A certificate and its key, PEM.
struct Leaf {
  std::string certificate;
  std::string key;
};

class Authority {
 public:
  explicit Authority(const std::string& name);
  ~Authority();
  Authority(Authority&&) noexcept;
  Authority& operator=(Authority&&) noexcept;

  Leaf issue(const Wish& wish = {}) const;
  // An authority that this one vouches for.
  Authority intermediate(const std::string& name) const;
  const std::string& pem() const { return pem_; }

 private:
  struct Parts;
  Authority(std::unique_ptr<Parts> parts, std::string pem);
  std::unique_ptr<Parts> parts_;
  std::string pem_;
};

// Writes ca.crt, tls.crt and tls.key, as an orchestrator does: into a new directory, to which `directory`, a
// link, points from then on. The paths in the options stay the same from one call to the next.
Options write_files(const std::string& directory, const std::string& authorities, const Leaf& leaf);

}  // namespace conclave::tls
