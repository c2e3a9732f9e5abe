#include "checkpoint/checkpoint.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "checkpoint/test_files.h"

namespace megamoe {
namespace {

namespace fs = std::filesystem;
using testing::expect_error;
using testing::TempDir;
using testing::TestTensor;
using testing::write_bytes;
using testing::write_index;
using testing::write_safetensors;

TestTensor byte_tensor(const std::string& name, std::uint8_t value) {
  return testing::tensor<std::uint8_t>(name, DType::kU8, {1}, {value});
}

const std::string kShard1 = "model-00001-of-00003.safetensors";
const std::string kShard2 = "model-00002-of-00003.safetensors";
const std::string kShard3 = "model-00003-of-00003.safetensors";

// Three shards; expert 0's weight is in one and its scale in another.
class Shards : public ::testing::Test {
 protected:
  void SetUp() override {
    write_safetensors(dir_ / kShard1, {byte_tensor("e.0.weight", 10), byte_tensor("e.1.weight", 11)});
    write_safetensors(dir_ / kShard2, {byte_tensor("e.0.scale", 20)});
    write_safetensors(dir_ / kShard3, {byte_tensor("e.1.scale", 21), byte_tensor("norm", 30)});
    write_index(dir_.path(), map_);
  }
  void expect_refused(const std::vector<std::string>& parts, ErrorCode code = ErrorCode::kInvalidFile) {
    expect_error(code, parts, [&] { Checkpoint::open(dir_.path()); });
  }
  void expect_loads() {
    const auto checkpoint = Checkpoint::open(dir_.path());
    ASSERT_EQ(checkpoint->tensors().size(), 5u);
    EXPECT_EQ(checkpoint->files().size(), 3u);
    EXPECT_EQ(checkpoint->at("e.0.weight").bytes()[0], std::byte{10});
    EXPECT_EQ(checkpoint->at("e.0.scale").bytes()[0], std::byte{20});
    EXPECT_EQ(checkpoint->at("e.1.scale").bytes()[0], std::byte{21});
    EXPECT_EQ(checkpoint->at("e.0.scale").file->path().filename(), kShard2);
  }

  TempDir dir_;
  std::map<std::string, std::string> map_ = {{"e.0.weight", kShard1},
                                             {"e.1.weight", kShard1},
                                             {"e.0.scale", kShard2},
                                             {"e.1.scale", kShard3},
                                             {"norm", kShard3}};
};

TEST_F(Shards, LoadWithAnIndex) {
  expect_loads();
  EXPECT_TRUE(Checkpoint::open(dir_.path())->has_index());
}

TEST_F(Shards, LoadWithoutAnIndex) {
  fs::remove(dir_ / "model.safetensors.index.json");
  expect_loads();
  EXPECT_FALSE(Checkpoint::open(dir_.path())->has_index());
}

TEST_F(Shards, SourcesAreAllThatIsRead) {
  write_bytes(dir_ / "config.json", "{}");
  const std::vector<fs::path> sources = Checkpoint::open(dir_.path())->sources();
  for (const std::string& name :
       {std::string("config.json"), std::string("model.safetensors.index.json"), kShard2})
    EXPECT_EQ(std::count(sources.begin(), sources.end(), dir_ / name), 1) << name;
  EXPECT_EQ(std::count(sources.begin(), sources.end(), dir_ / "hf_quant_config.json"), 0);
}

TEST_F(Shards, AMissingShardIsNamed) {
  fs::remove(dir_ / kShard2);
  expect_refused({"model.safetensors.index.json", kShard2, "e.0.scale", "missing"});
  fs::remove(dir_ / "model.safetensors.index.json");
  expect_refused({kShard2, "missing"});
}

TEST_F(Shards, ATruncatedShardIsNamed) {
  fs::resize_file(dir_ / kShard2, fs::file_size(dir_ / kShard2) - 1);
  expect_refused({kShard2, "e.0.scale"});
}

TEST_F(Shards, ATensorAbsentFromItsShardIsNamed) {
  map_["e.9.weight"] = kShard2;
  write_index(dir_.path(), map_);
  expect_refused({kShard2, "e.9.weight"});
}

TEST_F(Shards, ATensorInAnotherShardThanTheIndexSaysIsNamed) {
  map_["norm"] = kShard1;
  write_index(dir_.path(), map_);
  expect_refused({kShard1, "norm"});
}

TEST_F(Shards, ATensorInTwoFilesIsNamed) {
  write_safetensors(dir_ / kShard2, {byte_tensor("e.0.scale", 20), byte_tensor("norm", 31)});
  expect_refused({kShard2, "norm"});
  fs::remove(dir_ / "model.safetensors.index.json");
  expect_refused({kShard2, kShard3, "norm", "two files"});
}

TEST_F(Shards, AFileTheIndexDoesNotNameIsIgnored) {
  write_safetensors(dir_ / "extra.safetensors", {byte_tensor("norm", 99), byte_tensor("stray", 98)});
  write_bytes(dir_ / "broken.safetensors", "x");
  expect_loads();
  EXPECT_EQ(Checkpoint::open(dir_.path())->find("stray"), nullptr);
}

TEST_F(Shards, AnUnlistedTensorInAListedFileIsNamed) {
  map_.erase("norm");
  write_index(dir_.path(), map_);
  expect_refused({kShard3, "norm"});
}

TEST_F(Shards, FileNamesStayInTheDirectory) {
  fs::create_directory(dir_ / "sub");
  fs::copy(dir_ / kShard3, dir_ / "sub");
  for (const std::string& name :
       {"../" + kShard3, (dir_ / kShard3).string(), "./" + kShard3, "sub/" + kShard3, "sub\\" + kShard3,
        std::string(".."), std::string("."), std::string(""), std::string(".safetensors"),
        std::string("config.json"), kShard3 + std::string(1, '\0')}) {
    SCOPED_TRACE(name);
    map_["norm"] = name;
    write_index(dir_.path(), map_);
    expect_refused({"norm", "same directory"});
  }
}

TEST_F(Shards, ASymbolicLinkIsFollowedButNotIntoTheVoid) {
  TempDir blobs;
  fs::rename(dir_ / kShard2, blobs / "blob");
  fs::create_symlink(blobs / "blob", dir_ / kShard2);
  expect_loads();
  fs::remove(blobs / "blob");
  expect_refused({kShard2, "missing"});
}

TEST_F(Shards, AMalformedIndexIsRefused) {
  const fs::path index = dir_ / "model.safetensors.index.json";
  for (const char* text :
       {"", "[]", "{", "{}", R"({"weight_map":[]})", R"({"weight_map":null})", R"({"weight_map":{}})",
        R"({"weight_map":{"norm":1}})", R"({"weight_map":{"norm":null}})",
        R"({"weight_map":{"norm":"a.safetensors","norm":"a.safetensors"}})"}) {
    SCOPED_TRACE(text);
    write_bytes(index, text);
    expect_refused({"model.safetensors.index.json"});
  }
  fs::remove(index);
  fs::create_directory(index);
  expect_refused({"model.safetensors.index.json"}, ErrorCode::kInvalidArgument);
}

TEST(Checkpoint, OpensOneFile) {
  TempDir dir;
  write_safetensors(dir / "any.safetensors", {byte_tensor("b", 1), byte_tensor("a", 2)});
  write_bytes(dir / "config.json", "broken");
  const auto checkpoint = Checkpoint::open(dir / "any.safetensors");
  ASSERT_EQ(checkpoint->tensors().size(), 2u);
  EXPECT_EQ(checkpoint->tensors()[0].info->name, "a");
  EXPECT_EQ(checkpoint->at("a").bytes()[0], std::byte{2});
  EXPECT_EQ(checkpoint->at("b").bytes()[0], std::byte{1});
  EXPECT_TRUE(checkpoint->config().is_null());
  EXPECT_FALSE(checkpoint->has_index());
}

TEST(Checkpoint, FindsEveryTensorOfManyAndNoOther) {
  TempDir dir;
  std::vector<TestTensor> tensors;
  for (int i = 0; i < 1000; ++i)
    tensors.push_back(byte_tensor(fmt::format("t.{}", i), static_cast<std::uint8_t>(i)));
  write_safetensors(dir / "m.safetensors", tensors);
  const auto checkpoint = Checkpoint::open(dir.path());
  for (int i = 0; i < 1000; ++i) {
    const TensorRef* found = checkpoint->find(fmt::format("t.{}", i));
    ASSERT_NE(found, nullptr);
    EXPECT_EQ(found->bytes()[0], static_cast<std::byte>(i));
  }
  for (const char* name : {"", "t", "t.", "t.1000", "t.00", "u", "a"}) {
    EXPECT_EQ(checkpoint->find(name), nullptr) << name;
    expect_error(ErrorCode::kNotFound, {std::string("\"") + name + "\""}, [&] { checkpoint->at(name); });
  }
}

TEST(Checkpoint, TheSingleFileIsTheModelWhateverLiesBesideIt) {
  TempDir dir;
  write_safetensors(dir / "model.safetensors", {byte_tensor("w", 1)});
  write_safetensors(dir / "activations.safetensors", {byte_tensor("w", 2), byte_tensor("x", 3)});
  const auto checkpoint = Checkpoint::open(dir.path());
  EXPECT_EQ(checkpoint->tensors().size(), 1u);
  EXPECT_EQ(checkpoint->at("w").bytes()[0], std::byte{1});
}

TEST(Checkpoint, ReadsTheConfigs) {
  TempDir dir;
  write_safetensors(dir / "model.safetensors", {byte_tensor("w", 1)});
  EXPECT_TRUE(Checkpoint::open(dir.path())->config().is_null());
  write_bytes(dir / "config.json", R"({"model_type": "x"})");
  write_bytes(dir / "hf_quant_config.json", R"({"producer": {}})");
  EXPECT_EQ(Checkpoint::open(dir.path())->config().at("model_type"), "x");
  EXPECT_TRUE(Checkpoint::open(dir.path())->hf_quant_config().contains("producer"));
  for (const char* name : {"config.json", "hf_quant_config.json"}) {
    const std::string good = testing::read_bytes(dir / name);
    for (const char* text : {"", "{", "[]", "null", R"({"a":1,"a":2})"}) {
      write_bytes(dir / name, text);
      expect_error(ErrorCode::kInvalidFile, {name}, [&] { Checkpoint::open(dir.path()); });
    }
    write_bytes(dir / name, good);
  }
}

TEST(Checkpoint, SaysWhatItMayNotExamine) {
  const TempDir dir;
  fs::create_symlink("model.safetensors", dir / "model.safetensors");
  expect_error(ErrorCode::kIo, {"cannot examine", "model.safetensors"},
               [&] { Checkpoint::open(dir.path()); });
}

TEST(Checkpoint, RefusesWhatIsNotThere) {
  TempDir dir;
  expect_error(ErrorCode::kNoFile, {"absent", "does not exist"}, [&] { Checkpoint::open(dir / "absent"); });
  expect_error(ErrorCode::kNoFile, {".safetensors", dir.path().string()},
               [&] { Checkpoint::open(dir.path()); });
  fs::create_directory(dir / "model.safetensors");
  expect_error(ErrorCode::kNoFile, {".safetensors"}, [&] { Checkpoint::open(dir.path()); });
  expect_error(ErrorCode::kInvalidArgument, {"/dev/null"}, [&] { Checkpoint::open("/dev/null"); });
}

}  // namespace
}  // namespace megamoe
