#include "checkpoint/safetensors_writer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "checkpoint/safetensors.h"
#include "checkpoint/test_files.h"

namespace megamoe {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;
using testing::read_bytes;
using testing::TempDir;

std::span<const std::byte> as_bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

// Tensors of odd sizes and mixed types; the content of each follows from its number.
std::vector<PlannedTensor> make_plan(int count = 12) {
  std::vector<PlannedTensor> plan;
  for (int i = 0; i < count; ++i) {
    const DType dtypes[] = {DType::kU8, DType::kE4M3, DType::kF32, DType::kBF16, DType::kI64};
    plan.push_back({fmt::format("layers.{}.w", i), dtypes[i % 5], {i % 4 + 1, 3}});
  }
  return plan;
}
std::string content(const PlannedTensor& tensor, int number) {
  std::string data(static_cast<std::size_t>(tensor.bytes()), '\0');
  for (std::size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<char>(static_cast<std::size_t>(number) * 31 + i * 7 + 1);
  }
  return data;
}
const std::map<std::string, std::string> kMetadata = {{"format", "pt"}, {"note", "a \"quoted\"\nline"}};

class Writer : public ::testing::Test {
 protected:
  SafetensorsWriter open(const std::string& recipe = "r", std::int64_t flush_bytes = 1) {
    return SafetensorsWriter(path_, plan_, kMetadata, recipe, flush_bytes);
  }
  void write_some(SafetensorsWriter& writer, std::int64_t until) {
    for (std::int64_t i = writer.completed(); i < until; ++i) {
      writer.write(as_bytes(content(plan_[static_cast<std::size_t>(i)], static_cast<int>(i))));
    }
  }
  // The bytes of a run without interruption.
  std::string uninterrupted() {
    TempDir other;
    SafetensorsWriter writer(other / "m.safetensors", plan_, kMetadata, "r");
    write_some(writer, std::ssize(plan_));
    writer.finish();
    return read_bytes(other / "m.safetensors");
  }
  void finish_and_compare(SafetensorsWriter& writer) {
    write_some(writer, std::ssize(plan_));
    writer.finish();
    EXPECT_TRUE(read_bytes(path_) == uninterrupted());
    EXPECT_EQ(std::distance(fs::directory_iterator(dir_.path()), fs::directory_iterator()), 1)
        << "something beside the finished file is left";
  }
  // Runs `body` in a child process and returns its wait status.
  static int in_child(const std::function<void()>& body) {
    const pid_t child = fork();
    if (child == 0) {
      try {
        body();
      } catch (...) {
        _exit(99);
      }
      _exit(0);
    }
    int status = 0;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    return status;
  }

  TempDir dir_;
  fs::path path_ = dir_ / "m.safetensors";
  std::vector<PlannedTensor> plan_ = make_plan();
};

TEST_F(Writer, TheReaderFindsWhatWasWritten) {
  SafetensorsWriter writer = open();
  EXPECT_EQ(writer.completed(), 0);
  write_some(writer, std::ssize(plan_));
  EXPECT_FALSE(fs::exists(path_)) << "the name must not be there before the file is whole";
  writer.finish();
  const SafetensorsFile file = SafetensorsFile::open(path_);
  EXPECT_EQ(file.metadata(), kMetadata);
  ASSERT_EQ(file.tensors().size(), plan_.size());
  std::map<std::string, const TensorInfo*> by_name;
  for (const TensorInfo& tensor : file.tensors()) {
    by_name[tensor.name] = &tensor;
    EXPECT_EQ(tensor.begin % std::max(bits_of(tensor.dtype) / 8, 1), 0) << tensor.name << " is not aligned";
  }
  EXPECT_EQ(file.tensors().front().begin % 8, 0);
  for (std::size_t i = 0; i < plan_.size(); ++i) {
    const TensorInfo& tensor = *by_name.at(plan_[i].name);
    EXPECT_EQ(tensor.dtype, plan_[i].dtype);
    EXPECT_EQ(tensor.shape, plan_[i].shape);
    const std::string expected = content(plan_[i], static_cast<int>(i));
    const auto bytes = file.bytes(tensor);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), expected);
  }
}

TEST_F(Writer, WritesTheSameFileAtOnce) {
  SafetensorsWriter writer(path_, plan_, {}, "r");
  write_some(writer, std::ssize(plan_));
  writer.finish();
  std::vector<std::string> contents;
  for (std::size_t i = 0; i < plan_.size(); ++i) contents.push_back(content(plan_[i], static_cast<int>(i)));
  std::vector<std::span<const std::byte>> data;
  for (const std::string& bytes : contents) data.push_back(as_bytes(bytes));
  write_safetensors(dir_ / "at_once", plan_, data);
  EXPECT_TRUE(read_bytes(dir_ / "at_once") == read_bytes(path_));
}

TEST_F(Writer, AnEmptyPlanIsAFile) {
  SafetensorsWriter writer(path_, {}, {}, "r");
  writer.finish();
  EXPECT_TRUE(SafetensorsFile::open(path_).tensors().empty());
}

TEST_F(Writer, ScalarsAndEmptyTensors) {
  SafetensorsWriter writer(
      path_, {{"empty", DType::kU8, {0, 5}}, {"scalar", DType::kF32, {}}, {"", DType::kF4, {2}}}, {}, "r");
  writer.write({});
  writer.write(as_bytes("1234"));
  writer.write(as_bytes("5"));
  writer.finish();
  EXPECT_EQ(SafetensorsFile::open(path_).tensors().size(), 3u);
}

TEST_F(Writer, ContinuesBehindTheLastTensor) {
  for (std::int64_t cut = 0; cut <= std::ssize(plan_); ++cut) {
    {
      SafetensorsWriter writer = open();
      write_some(writer, cut);
    }
    EXPECT_FALSE(fs::exists(path_));
    SafetensorsWriter writer = open();
    EXPECT_EQ(writer.completed(), cut);
    finish_and_compare(writer);
    fs::remove(path_);
  }
}

TEST_F(Writer, ContinuesAfterAKill) {
  for (const std::int64_t cut : {0, 1, 7, 12}) {
    const int status = in_child([&] {
      SafetensorsWriter writer = open();
      write_some(writer, cut);
      kill(getpid(), SIGKILL);
    });
    ASSERT_TRUE(WIFSIGNALED(status));
    EXPECT_FALSE(fs::exists(path_));
    SafetensorsWriter writer = open();
    EXPECT_EQ(writer.completed(), cut);
    finish_and_compare(writer);
    fs::remove(path_);
  }
}

TEST_F(Writer, WhatWasNotFlushedIsWrittenAgainAfterAKill) {
  const int status = in_child([&] {
    SafetensorsWriter writer = open("r", 1 << 20);
    write_some(writer, 9);
    kill(getpid(), SIGKILL);
  });
  ASSERT_TRUE(WIFSIGNALED(status));
  SafetensorsWriter writer = open();
  EXPECT_EQ(writer.completed(), 0);
  finish_and_compare(writer);
}

TEST_F(Writer, KillsAtAnyMomentDoNoHarm) {
  plan_ = make_plan(100);
  std::int64_t before = 0;
  for (int round = 0; round < 8; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      try {
        SafetensorsWriter writer = open();
        write_some(writer, std::ssize(plan_));
        pause();
      } catch (...) {
      }
      _exit(99);
    }
    usleep(3000 + 2500 * static_cast<unsigned>(round));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    EXPECT_FALSE(fs::exists(path_));
    const SafetensorsWriter writer = open();
    EXPECT_GE(writer.completed(), before);
    before = writer.completed();
  }
  SafetensorsWriter writer = open();
  finish_and_compare(writer);
}

TEST_F(Writer, AJournalLineThatWasCutOffDoesNotCount) {
  {
    SafetensorsWriter writer = open();
    write_some(writer, 3);
  }
  const fs::path journal = path_.string() + ".journal";
  testing::write_bytes(journal, read_bytes(journal) + "1");
  {
    SafetensorsWriter writer = open();
    EXPECT_EQ(writer.completed(), 3);
    write_some(writer, 5);
  }
  SafetensorsWriter writer = open();
  EXPECT_EQ(writer.completed(), 5);
  finish_and_compare(writer);
}

TEST_F(Writer, StartsAnewWhenAnythingDiffers) {
  const fs::path journal = path_.string() + ".journal", partial = path_.string() + ".partial";
  const std::vector<PlannedTensor> plan = plan_;
  const std::vector<std::pair<const char*, std::function<void()>>> changes = {
      {"recipe", [] {}},
      {"name", [&] { plan_[11].name += "x"; }},
      {"dtype", [&] { plan_[0].dtype = DType::kI8; }},
      {"shape",
       [&] {
         plan_[0].shape = {3, 1};
       }},
      {"order", [&] { std::swap(plan_[0], plan_[5]); }},
      {"longer",
       [&] {
         plan_.push_back({"more", DType::kU8, {1}});
       }},
      {"no journal", [&] { fs::remove(journal); }},
      {"empty journal", [&] { testing::write_bytes(journal, ""); }},
      {"absurd count", [&] { testing::write_bytes(journal, read_bytes(journal) + "13\n"); }},
      {"huge count",
       [&] { testing::write_bytes(journal, read_bytes(journal) + std::string(30, '9') + "\n"); }},
      {"garbage", [&] { testing::write_bytes(journal, read_bytes(journal) + "x\n"); }},
      {"no data", [&] { fs::remove(partial); }},
      {"short data", [&] { fs::resize_file(partial, fs::file_size(partial) - 1); }},
      {"long data", [&] { fs::resize_file(partial, fs::file_size(partial) + 1); }},
      {"other header", [&] { testing::write_bytes(partial, std::string(fs::file_size(partial), 'x')); }},
  };
  for (const auto& [name, change] : changes) {
    SCOPED_TRACE(name);
    plan_ = plan;
    {
      SafetensorsWriter writer = open();
      write_some(writer, 4);
    }
    change();
    SafetensorsWriter writer = open(std::string(name) == "recipe" ? "another" : "r");
    EXPECT_EQ(writer.completed(), 0);
    finish_and_compare(writer);
    fs::remove(path_);
  }
}

TEST_F(Writer, ReplacesAnOldFileOnlyAtTheEnd) {
  testing::write_bytes(path_, "old");
  SafetensorsWriter writer = open();
  write_some(writer, std::ssize(plan_));
  EXPECT_EQ(read_bytes(path_), "old");
  finish_and_compare(writer);
}

TEST_F(Writer, ASecondWriterIsRefused) {
  SafetensorsWriter writer = open();
  write_some(writer, 4);
  expect_error(ErrorCode::kIo, {"another writer", "m.safetensors"}, [&] { open(); });
  expect_error(ErrorCode::kIo, {"another writer"}, [&] { open("another recipe"); });
  const int status = in_child([&] {
    try {
      open();
    } catch (const Error&) {
      _exit(7);
    }
  });
  EXPECT_EQ(WEXITSTATUS(status), 7);
  finish_and_compare(writer);
}

TEST_F(Writer, RefusesAPlanThatNoFileCanHold) {
  const auto refused = [&](std::vector<PlannedTensor> plan, const std::string& part,
                           ErrorCode code = ErrorCode::kInvalidArgument) {
    expect_error(code, {part}, [&] { SafetensorsWriter(path_, plan, {}, "r"); });
    EXPECT_TRUE(fs::is_empty(dir_.path())) << "a refused plan leaves a file";
  };
  refused({{"a", DType::kU8, {1}}, {"b", DType::kU8, {1}}, {"a", DType::kU8, {1}}}, "\"a\"");
  refused({{"__metadata__", DType::kU8, {1}}}, "__metadata__");
  refused({{"a", DType::kU8, {-1}}}, "\"a\"");
  refused({{"a", DType::kF4, {3}}}, "\"a\"");
  refused({{"a", DType::kU8, {std::int64_t{1} << 40, std::int64_t{1} << 40}}}, "\"a\"");
  refused({{"a\xFF", DType::kU8, {1}}}, "UTF-8");
  const std::int64_t largest = (std::int64_t{1} << 60) - 1;
  std::vector<PlannedTensor> many;
  for (int i = 0; i < 9; ++i) many.push_back({std::to_string(i), DType::kU8, {largest}});
  refused(many, "64 bits", ErrorCode::kOutOfMemory);
  expect_error(ErrorCode::kInvalidArgument, {"UTF-8"}, [&] {
    SafetensorsWriter(path_, {}, {{"k", "\xC3("}}, "r");
  });
}

TEST_F(Writer, RefusesWrongCalls) {
  SafetensorsWriter writer = open();
  const std::string data = content(plan_[0], 0);
  expect_error(ErrorCode::kInvalidArgument, {"layers.0.w", "expected 3 bytes, got 2"},
               [&] { writer.write(as_bytes(data).first(2)); });
  expect_error(ErrorCode::kInvalidArgument, {"got 4"}, [&] { writer.write(as_bytes(data + "x")); });
  EXPECT_EQ(writer.completed(), 0);
  expect_error(ErrorCode::kInvalidArgument, {"0 of 12", "layers.0.w"}, [&] { writer.finish(); });
  write_some(writer, 11);
  expect_error(ErrorCode::kInvalidArgument, {"11 of 12", "layers.11.w"}, [&] { writer.finish(); });
  write_some(writer, 12);
  expect_error(ErrorCode::kInvalidArgument, {"12 tensors"}, [&] { writer.write(as_bytes(data)); });
  finish_and_compare(writer);
  expect_error(ErrorCode::kInvalidArgument, {"already finished"}, [&] { writer.finish(); });
}

TEST_F(Writer, AFullDiskIsAnErrorAtOnce) {
  // A limit on the size of files stands for a disk without room.
  const int status = in_child([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{4096, 4096};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(1);
    plan_.push_back({"large", DType::kU8, {100'000}});
    try {
      open();
    } catch (const Error& error) {
      _exit(error.code() == ErrorCode::kIo ? 7 : 2);
    }
  });
  EXPECT_EQ(WEXITSTATUS(status), 7);
  EXPECT_TRUE(fs::is_empty(dir_.path())) << "a file is left that nobody can finish";
}

TEST_F(Writer, RefusesPlacesItCannotWriteTo) {
  path_ = dir_ / "absent" / "m.safetensors";
  expect_error(ErrorCode::kIo, {"absent"}, [&] { open(); });
  path_ = dir_ / "d";
  fs::create_directory(path_);
  SafetensorsWriter writer = open();
  write_some(writer, std::ssize(plan_));
  expect_error(ErrorCode::kIo, {"rename"}, [&] { writer.finish(); });
  EXPECT_TRUE(fs::exists(path_.string() + ".partial")) << "the work must not be lost";
  writer.discard();
  EXPECT_FALSE(fs::exists(path_.string() + ".partial") || fs::exists(path_.string() + ".journal"));
}

TEST_F(Writer, AJournalBesideAWholeFileIsRemoved) {
  const fs::path journal = path_.string() + ".journal";
  std::string stale;
  {
    SafetensorsWriter writer = open();
    write_some(writer, std::ssize(plan_));
    remove_stale_journal(path_);
    ASSERT_TRUE(fs::exists(journal)) << "it belongs to the partial file";
    stale = read_bytes(journal);
    writer.finish();
  }
  testing::write_bytes(journal, stale);  // as a kill behind the rename leaves it
  remove_stale_journal(path_);
  EXPECT_FALSE(fs::exists(journal));
  remove_stale_journal(path_);
  testing::write_bytes(journal, "dear diary");
  remove_stale_journal(path_);
  EXPECT_TRUE(fs::exists(journal)) << "it is somebody else's";
}

}  // namespace
}  // namespace megamoe
