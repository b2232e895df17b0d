"""tidy.py must find what it is there for."""

import unittest

import tidy


class IncludeRules(unittest.TestCase):
    def faults(self, path, include):
        return tidy.check_includes(path, f"#include {include}\n")

    def test_outward_includes_are_found(self):
        self.assertTrue(self.faults("libs/base/a.h", '"libs/model/plan.h"'))
        self.assertTrue(self.faults("libs/model/a.h", '"libs/ports/executor.h"'))
        self.assertTrue(self.faults("scheduler/core/a.cc", '"libs/ports/executor.h"'))
        self.assertTrue(self.faults("attention_service/core/a.cc", '"libs/transport/ucx_transport.h"'))
        self.assertTrue(self.faults("attention_service/main.cc", '"scheduler/core/core.h"'))

    def test_inward_includes_pass(self):
        self.assertEqual(self.faults("libs/ports/a.h", '"libs/model/plan.h"'), [])
        self.assertEqual(self.faults("attention_service/core/a.cc", '"libs/kernels/ops.h"'), [])
        self.assertEqual(self.faults("cli/up.cc", '"router_service/server.h"'), [])

    def test_heavy_libraries_stay_out_of_cores(self):
        for header in ("<grpcpp/grpcpp.h>", "<ucp/api/ucp.h>", "<yaml-cpp/yaml.h>", "<prometheus/counter.h>",
                       "<cuda_runtime.h>", '"conclave/v1/cluster.pb.h"'):
            self.assertTrue(self.faults("scheduler/core/a.cc", header), header)
            self.assertTrue(self.faults("libs/ports/a.h", header), header)
        self.assertTrue(self.faults("libs/config/config.h", "<yaml-cpp/yaml.h>"))
        self.assertEqual(self.faults("libs/config/config.cc", "<yaml-cpp/yaml.h>"), [])

    def test_includes_start_at_the_root(self):
        self.assertTrue(self.faults("libs/base/a.cc", '"status.h"'))


class DeadFiles(unittest.TestCase):
    def test_unbuilt_and_unincluded(self):
        texts = {"libs/x/CMakeLists.txt": "SOURCES a.cc", "libs/x/a.cc": '#include "libs/x/a.h"\n', "libs/x/a.h": "",
                 "libs/x/b.cc": "", "libs/x/b.h": ""}
        faults = tidy.check_dead(list(texts), texts)
        self.assertEqual(sorted(f.split(":")[0] for f in faults), ["libs/x/b.cc", "libs/x/b.h"])


if __name__ == "__main__":
    unittest.main()
