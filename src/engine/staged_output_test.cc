#include "engine/staged_output.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "checkpoint/test_files.h"

namespace megamoe {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;
using testing::read_bytes;
using testing::TempDir;
using testing::write_bytes;

TEST(StagedOutput, AppearsWholeAndLeavesNothingElse) {
  const TempDir dir;
  {
    StagedOutput output(dir / "dst/", false, "recipe");
    write_bytes(output.directory() / "a", "1");
    EXPECT_FALSE(fs::exists(dir / "dst"));
    output.commit();
  }
  EXPECT_EQ(read_bytes(dir / "dst/a"), "1");
  EXPECT_EQ(std::distance(fs::directory_iterator(dir / "dst"), {}), 1);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 1);
}

TEST(StagedOutput, ContinuesTheSameRecipeOnly) {
  const TempDir dir;
  { write_bytes(StagedOutput(dir / "dst", false, "one").directory() / "a", "1"); }
  { EXPECT_TRUE(fs::exists(StagedOutput(dir / "dst", false, "one").directory() / "a")); }
  { EXPECT_FALSE(fs::exists(StagedOutput(dir / "dst", false, "two").directory() / "a")); }
  EXPECT_FALSE(fs::exists(dir / "dst"));
}

TEST(StagedOutput, ReplacesOnlyWhenAskedAndComplete) {
  const TempDir dir;
  fs::create_directory(dir / "dst");
  write_bytes(dir / "dst/old.safetensors", "old");
  expect_error(ErrorCode::kInvalidArgument, {"exists already"},
               [&] { StagedOutput(dir / "dst", false, "r"); });
  {
    StagedOutput output(dir / "dst", true, "r");
    write_bytes(output.directory() / "new", "new");
    EXPECT_EQ(read_bytes(dir / "dst/old.safetensors"), "old");
    output.commit();
  }
  EXPECT_EQ(read_bytes(dir / "dst/new"), "new");
  EXPECT_EQ(std::distance(fs::directory_iterator(dir / "dst"), {}), 1);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 1);
}

TEST(StagedOutput, DoesNotDeleteWhatIsNoCheckpoint) {
  const TempDir dir;
  fs::create_directory(dir / "home");
  write_bytes(dir / "home/letter.txt", "dear");
  expect_error(ErrorCode::kInvalidArgument, {"no .safetensors file"},
               [&] { StagedOutput(dir / "home", true, "r"); });
  fs::create_directories(dir / "models/llama");
  write_bytes(dir / "models/stray.safetensors", "x");
  expect_error(ErrorCode::kInvalidArgument, {"models holds the folder llama"},
               [&] { StagedOutput(dir / "models", true, "r"); });
  EXPECT_TRUE(fs::exists(dir / "models/llama"));
  write_bytes(dir / "file", "x");
  expect_error(ErrorCode::kInvalidArgument, {"not a directory"},
               [&] { StagedOutput(dir / "file", true, "r"); });
  fs::create_directory(dir / "dst.partial");
  write_bytes(dir / "dst.partial/mine", "x");
  expect_error(ErrorCode::kInvalidArgument, {"in the way"}, [&] { StagedOutput(dir / "dst", false, "r"); });
  expect_error(ErrorCode::kInvalidArgument, {"/proc is where a file system is mounted"},
               [&] { StagedOutput("/proc", true, "r"); });
  EXPECT_TRUE(fs::exists(dir / "home/letter.txt"));
  EXPECT_TRUE(fs::exists(dir / "dst.partial/mine"));
}

TEST(StagedOutput, ReplacesTheWorkingDirectoryUnderItsName) {
  const TempDir dir;
  fs::create_directory(dir / "dst");
  write_bytes(dir / "dst/old.safetensors", "old");
  const fs::path before = fs::current_path();
  fs::current_path(dir / "dst");
  {
    StagedOutput output(".", true, "r");
    EXPECT_EQ(output.directory(), fs::canonical(dir / "dst").string() + ".partial");
    write_bytes(output.directory() / "new", "new");
    output.commit();
  }
  fs::current_path(before);
  EXPECT_EQ(read_bytes(dir / "dst/new"), "new");
  EXPECT_FALSE(fs::exists(dir / "dst/old.safetensors"));
}

TEST(StagedOutput, ALinkStaysAndWhatItLeadsToIsReplaced) {
  const TempDir dir;
  fs::create_directory(dir / "real");
  write_bytes(dir / "real/old.safetensors", "old");
  fs::create_directory_symlink("real", dir / "to_real");
  fs::create_directory_symlink("absent", dir / "to_absent");
  for (const auto& [link, real] : {std::pair("to_real", "real"), {"to_absent", "absent"}}) {
    StagedOutput output(dir / link, true, "r");
    write_bytes(output.directory() / "new", "new");
    output.commit();
    EXPECT_TRUE(fs::is_symlink(dir / link));
    EXPECT_FALSE(fs::is_symlink(dir / real));
    EXPECT_EQ(read_bytes(dir / real / "new"), "new");
    EXPECT_EQ(std::distance(fs::directory_iterator(dir / real), {}), 1);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 4);
  fs::create_symlink("circle", dir / "circle");
  expect_error(ErrorCode::kIo, {"circle"}, [&] { StagedOutput(dir / "circle", true, "r"); });
}

TEST(StagedOutput, IsBuiltByOneRunAtATime) {
  const TempDir dir;
  const StagedOutput first(dir / "dst", false, "r");
  expect_error(ErrorCode::kInvalidArgument, {"another run"}, [&] { StagedOutput(dir / "dst", false, "r"); });
}

TEST(StagedOutput, SaysWhatTheSystemRefused) {
  const TempDir dir;
  write_bytes(dir / "file", "x");
  expect_error(ErrorCode::kIo, {"file/dst.partial"}, [&] { StagedOutput(dir / "file/dst", false, "r"); });
}

}  // namespace
}  // namespace megamoe
