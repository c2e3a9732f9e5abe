#include "base/file.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <string>

#include "base/check.h"
#include "base/test_error.h"

namespace megamoe {
namespace {

namespace fs = std::filesystem;

class FileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "megamoe-file-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    dir_ = name;
  }
  void TearDown() override { fs::remove_all(dir_); }
  void put(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }
  std::ptrdiff_t entries() const {
    return std::distance(fs::directory_iterator(dir_), fs::directory_iterator());
  }

  fs::path dir_;
};

TEST_F(FileTest, MapsAFile) {
  std::string text(100'000, 'a');
  text.back() = 'z';
  put(dir_ / "f", text);
  const MappedFile file(dir_ / "f");
  ASSERT_EQ(file.bytes().size(), text.size());
  EXPECT_EQ(std::memcmp(file.bytes().data(), text.data(), text.size()), 0);
}

TEST_F(FileTest, AnEmptyFileHasNoBytes) {
  put(dir_ / "f", "");
  EXPECT_TRUE(MappedFile(dir_ / "f").bytes().empty());
  EXPECT_EQ(read_text_file(dir_ / "f"), "");
}

TEST_F(FileTest, RefusesWhatIsNotARegularFile) {
  ASSERT_EQ(mkfifo((dir_ / "fifo").c_str(), 0600), 0);
  put(dir_ / "f", "x");
  EXPECT_EQ(code_of([&] { MappedFile file(dir_); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { MappedFile file(dir_ / "fifo"); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { MappedFile file("/dev/null"); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { MappedFile file(dir_ / "absent"); }), ErrorCode::kNotFound);
  EXPECT_EQ(code_of([&] { MappedFile file(dir_ / "f" / "below"); }), ErrorCode::kNotFound);
  EXPECT_EQ(code_of([&] { MappedFile file(""); }), ErrorCode::kNotFound);
  EXPECT_EQ(code_of([&] { read_text_file(dir_); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { read_text_file(dir_ / "absent"); }), ErrorCode::kNotFound);
}

TEST_F(FileTest, ReadsTextUpToALimit) {
  put(dir_ / "f", "12345");
  EXPECT_EQ(read_text_file(dir_ / "f", 5), "12345");
  EXPECT_EQ(code_of([&] { read_text_file(dir_ / "f", 4); }), ErrorCode::kInvalidFile);
}

TEST_F(FileTest, WritesAtomicallyOverAnOldFile) {
  put(dir_ / "f", "old and longer");
  write_file_atomically(dir_ / "f", "new");
  EXPECT_EQ(read_text_file(dir_ / "f"), "new");
  write_file_atomically(dir_ / "g", "");
  EXPECT_EQ(read_text_file(dir_ / "g"), "");
  EXPECT_EQ(entries(), 2) << "a temporary file was left";
}

TEST_F(FileTest, TellsWhetherItCouldWriteAndTouchesNothing) {
  put(dir_ / "f", "old");
  check_writable(dir_ / "f");
  check_writable(dir_ / "new");
  EXPECT_EQ(read_text_file(dir_ / "f"), "old");
  EXPECT_EQ(code_of([&] { check_writable(dir_); }), ErrorCode::kIo);
  EXPECT_EQ(code_of([&] { check_writable(dir_ / "no" / "f"); }), ErrorCode::kIo);
  EXPECT_EQ(entries(), 1);
}

TEST_F(FileTest, AFailedWriteLeavesNothingBehind) {
  EXPECT_EQ(code_of([&] { write_file_atomically(dir_ / "no" / "f", "x"); }), ErrorCode::kIo);
  fs::create_directory(dir_ / "d");
  put(dir_ / "d" / "inside", "x");
  EXPECT_EQ(code_of([&] { write_file_atomically(dir_ / "d", "x"); }), ErrorCode::kIo);
  EXPECT_EQ(entries(), 1) << "a temporary file was left";
}

}  // namespace
}  // namespace megamoe
