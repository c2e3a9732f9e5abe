#include "base/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

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
  EXPECT_EQ(code_of([&] { MappedFile file(dir_ / "absent"); }), ErrorCode::kNoFile);
  EXPECT_EQ(code_of([&] { MappedFile file(dir_ / "f" / "below"); }), ErrorCode::kNoFile);
  EXPECT_EQ(code_of([&] { MappedFile file(""); }), ErrorCode::kNoFile);
  EXPECT_EQ(code_of([&] { read_text_file(dir_); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { read_text_file(dir_ / "absent"); }), ErrorCode::kNoFile);
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
  EXPECT_EQ(code_of([&] { check_writable(""); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { check_writable(dir_ / "no" / "f"); }), ErrorCode::kIo);
  EXPECT_EQ(entries(), 1);
}

TEST_F(FileTest, WritesToWhereALinkLeads) {
  fs::create_directory(dir_ / "d");
  put(dir_ / "d" / "there", "old");
  fs::create_symlink("d/there", dir_ / "to_there");
  fs::create_symlink("to_there", dir_ / "to_link");
  fs::create_symlink("d/absent", dir_ / "to_absent");
  for (const char* link : {"to_there", "to_link", "to_absent"}) {
    check_writable(dir_ / link);
    write_file_atomically(dir_ / link, link);
    EXPECT_TRUE(fs::is_symlink(dir_ / link));
    EXPECT_EQ(read_text_file(dir_ / link), link);
  }
  EXPECT_EQ(read_text_file(dir_ / "d" / "there"), "to_link");
  EXPECT_EQ(read_text_file(dir_ / "d" / "absent"), "to_absent");
  fs::create_symlink("circle", dir_ / "circle");
  fs::create_symlink("no/such", dir_ / "nowhere");
  for (const char* link : {"circle", "nowhere"}) {
    EXPECT_EQ(code_of([&] { check_writable(dir_ / link); }), ErrorCode::kIo);
    EXPECT_EQ(code_of([&] { write_file_atomically(dir_ / link, "x"); }), ErrorCode::kIo);
  }
  EXPECT_EQ(entries(), 6) << "a temporary file was left";
}

TEST_F(FileTest, WritesToDevicesAndPipesThemselves) {
  check_writable("/dev/null");
  write_file_atomically("/dev/null", "x");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_EQ(code_of([&] { write_file_atomically("/dev/full", "x"); }), ErrorCode::kIo);
  const fs::path pipe = dir_ / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const FileDescriptor reader(::open(pipe.c_str(), O_RDONLY | O_NONBLOCK));
  check_writable(pipe);
  write_file_atomically(pipe, "through");
  char text[16];
  EXPECT_EQ(::read(reader.get(), text, sizeof(text)), 7);
  EXPECT_TRUE(fs::is_fifo(pipe));
  EXPECT_EQ(entries(), 1);
}

TEST_F(FileTest, KnowsTheNameToRenameTo) {
  fs::create_directory(dir_ / "d");
  fs::create_directory_symlink("d", dir_ / "link");
  EXPECT_EQ(renameable(dir_ / "new/"), dir_ / "new");
  EXPECT_EQ(renameable(dir_ / "d" / "."), fs::canonical(dir_ / "d"));
  EXPECT_EQ(renameable(dir_ / "d" / ".."), fs::canonical(dir_));
  EXPECT_EQ(renameable(dir_ / "link/"), fs::canonical(dir_ / "d"));
  EXPECT_EQ(renameable(dir_ / "link" / "new"), dir_ / "link" / "new");
}

TEST_F(FileTest, AnInputIsNotWrittenTo) {
  fs::create_directory(dir_ / "model");
  put(dir_ / "file", "x");
  put(dir_ / "model" / "config", "x");
  fs::create_symlink(dir_ / "file", dir_ / "link");
  fs::create_symlink("../file", dir_ / "model" / "link");
  fs::create_symlink("model/nothing", dir_ / "dangling");
  const auto code = [&](const fs::path& output, const fs::path& input) {
    return code_of([&] { check_is_no_input(output, {dir_ / "other", input}); });
  };
  fs::create_hard_link(dir_ / "file", dir_ / "twin");
  for (const char* output : {"file", "link", "twin", "model/link", "model/../file"})
    EXPECT_EQ(code(dir_ / output, dir_ / "file"), ErrorCode::kInvalidArgument) << output;
  for (const char* output : {"model", "model/config", "model/link", "model/new", "model/d/new", "dangling"})
    EXPECT_EQ(code(dir_ / output, dir_ / "model"), ErrorCode::kInvalidArgument) << output;
  check_is_no_input(dir_ / "file2", {dir_ / "file", dir_ / "model"});
  check_is_no_input("new", {dir_ / "file", dir_ / "model"});
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
