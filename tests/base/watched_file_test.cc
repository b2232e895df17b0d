#include "libs/base/watched_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

namespace conclave {
namespace {

namespace fs = std::filesystem;

class WatchedFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    directory = ::testing::TempDir() + "conclave_watched_" + std::to_string(getpid());
    fs::create_directories(directory);
  }
  void TearDown() override { fs::remove_all(directory); }
  void put(const std::string& name, const std::string& text) {
    std::ofstream(directory + "/" + name, std::ios::trunc) << text;
  }
  std::string directory;
};

TEST_F(WatchedFileTest, ChangesShowHoweverTheyAreMade) {
  put("a", "one");
  WatchedFile file(directory + "/a", "the.key", 100);
  EXPECT_TRUE(file.changed()) << "nobody has read it yet";
  EXPECT_EQ(*file.read(), "one");
  EXPECT_FALSE(file.changed());
  put("a", "longer");
  EXPECT_TRUE(file.changed());
  EXPECT_EQ(*file.read(), "longer");
  // Replaced by another file, and by a link to another directory.
  put("b", "second");
  fs::rename(directory + "/b", directory + "/a");
  EXPECT_TRUE(file.changed());
  EXPECT_EQ(*file.read(), "second");
  EXPECT_FALSE(file.changed());
  for (const char* name : {"v1", "v2"}) {
    fs::create_directories(directory + "/" + name);
    put(std::string(name) + "/file", name);
  }
  fs::create_directory_symlink("v1", directory + "/now");
  WatchedFile behind(directory + "/now/file", "the.key", 100);
  EXPECT_EQ(*behind.read(), "v1");
  fs::create_directory_symlink("v2", directory + "/next");
  fs::rename(directory + "/next", directory + "/now");
  EXPECT_TRUE(behind.changed());
  EXPECT_EQ(*behind.read(), "v2");
  fs::remove(directory + "/now");
  EXPECT_TRUE(behind.changed());
  EXPECT_FALSE(behind.read().ok());
  EXPECT_FALSE(behind.changed()) << "it is known to be gone";
}

TEST_F(WatchedFileTest, WhatCannotBeReadNamesTheKey) {
  WatchedFile missing(directory + "/missing", "the.key", 100);
  EXPECT_EQ(field_of(missing.read().status()), "the.key");
  // What is no file: neither is waited for nor read.
  ASSERT_EQ(mkfifo((directory + "/pipe").c_str(), 0600), 0);
  for (const std::string& path : {directory, directory + "/pipe", std::string("/dev/zero")}) {
    WatchedFile other(path, "the.key", 100);
    const Status why = other.read().status();
    EXPECT_EQ(field_of(why), "the.key") << path;
    EXPECT_NE(message_of(why).find("no regular file"), std::string::npos) << why;
  }
  put("a", std::string(100, 'x'));
  WatchedFile file(directory + "/a", "the.key", 100);
  EXPECT_EQ(file.read()->size(), 100u);
  put("a", std::string(101, 'x'));
  EXPECT_NE(message_of(file.read().status()).find("more than 100 bytes"), std::string::npos);
}

}  // namespace
}  // namespace conclave
