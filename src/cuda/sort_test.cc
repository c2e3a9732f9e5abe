#include "cuda/sort.h"

#include <cmath>

#include "cuda/gpu_test.h"
#include "ref/operations.h"

namespace megamoe::cuda {
namespace {

struct Sorted {
  std::vector<std::int64_t> offsets;
  std::vector<std::int32_t> row_to_token, row_to_slot, slot_to_row;
  unsigned long long bad_id = 0;
  std::vector<float> of_row[2];    // e + 0.5 and -e for a row of expert e
  std::vector<RowTile> row_tiles;  // of kTileRows, where there are so few pairs that they can be asked for
};
constexpr int kTileRows = 3;

Sorted sort_on_gpu(const std::vector<std::int32_t>& ids, const std::vector<float>& weights, int top_k,
                   int experts, int poison = 0x7F) {
  const std::int64_t pairs = static_cast<std::int64_t>(ids.size()), tokens = pairs / top_k;
  const DeviceArray<std::int32_t> d_ids(ids);
  const DeviceArray<float> d_weights(weights);
  const Output<std::int64_t> offsets(experts + 1, poison);
  const Output<std::int32_t> row_to_token(pairs, poison), row_to_slot(pairs, poison),
      slot_to_row(pairs, poison);
  const Output<std::uint8_t> workspace(sort_workspace_bytes(tokens, top_k, experts), poison);
  std::vector<float> of_expert[2];
  for (int e = 0; e < experts; ++e) {
    of_expert[0].push_back(static_cast<float>(e) + 0.5f);
    of_expert[1].push_back(-static_cast<float>(e));
  }
  const DeviceArray<float> half(of_expert[0]), negative(of_expert[1]);
  const Output<float> of_row0(pairs, poison), of_row1(pairs, poison);
  const DeviceArray<unsigned long long> bad_id(std::vector<unsigned long long>{kNoBadId});
  constexpr int kCounters = 1100;  // more than a CTA has threads
  const Output<std::uint32_t> counters(kCounters, poison);
  const Output<RowTile> row_tiles(pairs, poison);
  const Output<std::int32_t> num_row_tiles(1, poison);
  const bool few = pairs <= kOnePartPairs;
  cuda_check(sort({.ids = d_ids.data(),
                   .weights = d_weights.data(),
                   .tokens = tokens,
                   .top_k = top_k,
                   .experts = experts,
                   .offsets = offsets.data(),
                   .row_to_token = row_to_token.data(),
                   .row_to_slot = row_to_slot.data(),
                   .slot_to_row = slot_to_row.data(),
                   .of_expert = {half.data(), negative.data()},
                   .of_row = {of_row0.data(), of_row1.data()},
                   .bad_id = bad_id.data(),
                   .counters = few ? counters.data() : nullptr,
                   .num_counters = kCounters,
                   .row_tiles = few ? row_tiles.data() : nullptr,
                   .num_row_tiles = num_row_tiles.data(),
                   .tile_rows = kTileRows,
                   .workspace = workspace.data()},
                  nullptr),
             "testing sort");
  workspace.download();  // looks at its guard
  std::vector<RowTile> tiles = row_tiles.download();
  if (few) {
    EXPECT_EQ(counters.download(), std::vector<std::uint32_t>(kCounters));
    tiles.resize(static_cast<std::size_t>(num_row_tiles.download()[0]));
  } else {
    tiles.clear();
  }
  return {offsets.download(),
          row_to_token.download(),
          row_to_slot.download(),
          slot_to_row.download(),
          bad_id.download()[0],
          {of_row0.download(), of_row1.download()},
          tiles};
}

// What the reference leaves of a poisoned routing, and slot_to_row as its inverse.
Sorted sort_on_cpu(const std::vector<std::int32_t>& ids, const std::vector<float>& weights, int top_k,
                   int experts, int poison = 0x7F) {
  Sorted s;
  s.offsets.resize(static_cast<std::size_t>(experts + 1));
  s.row_to_token.resize(ids.size());
  if (!ids.empty()) std::memset(s.row_to_token.data(), poison, ids.size() * 4);
  s.row_to_slot = s.row_to_token;
  ref::sort(ids.data(), weights.data(),
            {.tokens = static_cast<std::int64_t>(ids.size()) / top_k,
             .top_k = top_k,
             .num_experts = experts,
             .offsets = s.offsets.data(),
             .row_to_token = s.row_to_token.data(),
             .row_to_slot = s.row_to_slot.data()});
  s.slot_to_row.assign(ids.size(), -1);
  for (std::int64_t row = 0; row < s.offsets.back(); ++row) {
    const auto r = static_cast<std::size_t>(row);
    s.slot_to_row[static_cast<std::size_t>(s.row_to_token[r] * top_k + s.row_to_slot[r])] =
        static_cast<std::int32_t>(row);
  }
  for (std::vector<float>& of_row : s.of_row) {
    of_row.resize(ids.size());
    if (!ids.empty()) std::memset(of_row.data(), poison, ids.size() * 4);
  }
  for (int e = 0; e < experts; ++e) {
    for (std::int64_t row = s.offsets[static_cast<std::size_t>(e)];
         row < s.offsets[static_cast<std::size_t>(e) + 1]; ++row) {
      s.of_row[0][static_cast<std::size_t>(row)] = static_cast<float>(e) + 0.5f;
      s.of_row[1][static_cast<std::size_t>(row)] = -static_cast<float>(e);
    }
  }
  if (ids.size() > kOnePartPairs) return s;
  for (int e = 0; e < experts; ++e) {
    const std::int64_t end = s.offsets[static_cast<std::size_t>(e) + 1];
    for (std::int64_t row = s.offsets[static_cast<std::size_t>(e)]; row < end; row += kTileRows) {
      s.row_tiles.push_back({e, static_cast<std::int32_t>(std::min<std::int64_t>(end - row, kTileRows)),
                             static_cast<std::int32_t>(row)});
    }
  }
  return s;
}

void expect_same(const Sorted& got, const Sorted& want) {
  EXPECT_TRUE(same_bytes(got.offsets, want.offsets));
  EXPECT_TRUE(same_bytes(got.row_to_token, want.row_to_token));
  EXPECT_TRUE(same_bytes(got.row_to_slot, want.row_to_slot));
  EXPECT_TRUE(same_bytes(got.slot_to_row, want.slot_to_row));
  EXPECT_TRUE(same_bytes(got.of_row[0], want.of_row[0]));
  EXPECT_TRUE(same_bytes(got.of_row[1], want.of_row[1]));
  EXPECT_TRUE(same_bytes(got.row_tiles, want.row_tiles));
}

class SortTest : public GpuTest {};

// A workspace for some tokens must do for fewer. No GPU is asked.
TEST(SortWorkspace, NeverShrinks) {
  for (const auto& [top_k, experts] : {std::pair{6, 256}, {8, 256}, {10, 512}, {1, 1}, {4, 1024}}) {
    std::int64_t before = 0;
    for (std::int64_t tokens = 0; tokens < 70000; tokens += tokens < 20000 ? 1 : 97) {
      const std::int64_t bytes = sort_workspace_bytes(tokens, top_k, experts);
      ASSERT_GE(bytes, before) << tokens << " tokens, top " << top_k << " of " << experts;
      before = bytes;
    }
  }
}

TEST_F(SortTest, WrittenCase) {
  // Token 0: experts 2, 0; token 1: none, 2; token 2: 0 with weight 0, 2 twice in all.
  const Sorted s = sort_on_gpu({2, 0, -1, 2, 0, 2}, {1, 1, 1, 0.5f, 0, -1}, 2, 4);
  EXPECT_EQ(s.offsets, (std::vector<std::int64_t>{0, 1, 1, 4, 4}));
  EXPECT_EQ(s.slot_to_row, (std::vector<std::int32_t>{1, 0, -1, 2, -1, 3}));
  EXPECT_EQ(std::vector(s.row_to_token.begin(), s.row_to_token.begin() + 4),
            (std::vector<std::int32_t>{0, 0, 1, 2}));
  EXPECT_EQ(std::vector(s.row_to_slot.begin(), s.row_to_slot.begin() + 4),
            (std::vector<std::int32_t>{1, 0, 1, 1}));
  EXPECT_EQ(s.bad_id, kNoBadId);
}

TEST_F(SortTest, EqualsTheReference) {
  Random random(1);
  for (int round = 0; round < 60; ++round) {
    const int experts_of[] = {1, 2, 3, 5, 36, 40, 60, 127, 256, 512, 1000, 1024};
    const int experts = experts_of[round % 12], top_k = static_cast<int>(random.integer(1, 32));
    const std::int64_t tokens = round % 3 == 0 ? random.integer(1, 5) : random.integer(1, 1 << (round % 14));
    const int poison = round % 3 == 0 ? 0x7F : round % 3 == 1 ? 0xFF : 0;
    SCOPED_TRACE(::testing::Message() << tokens << " tokens, top " << top_k << " of " << experts);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * top_k));
    std::vector<float> weights(ids.size());
    const bool crowded = round % 5 == 0;  // most pairs to one expert
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int32_t>(
          crowded && random.integer(0, 9) > 0 ? experts - 1 : random.integer(-1, experts - 1));
      const std::int64_t kind = random.integer(0, 20);
      weights[i] = kind == 0 ? 0.0f : kind == 1 ? -0.0f : kind == 2 ? NAN : random.bell();
    }
    expect_same(sort_on_gpu(ids, weights, top_k, experts, poison),
                sort_on_cpu(ids, weights, top_k, experts, poison));
    if (HasFailure()) return;
  }
}

TEST_F(SortTest, LargeAndTheSameEveryTime) {
  Random random(2);
  std::vector<std::int32_t> ids(16384 * 8);
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random.integer(0, 255));
  const std::vector<float> weights(ids.size(), 1.0f);
  const Sorted want = sort_on_cpu(ids, weights, 8, 256);
  for (int i = 0; i < 20; ++i) expect_same(sort_on_gpu(ids, weights, 8, 256), want);
  // More than 256 parts' worth.
  std::vector<std::int32_t> many(3'000'000);
  for (std::int32_t& id : many) id = static_cast<std::int32_t>(random.integer(0, 2));
  const std::vector<float> ones(many.size(), 1.0f);
  expect_same(sort_on_gpu(many, ones, 3, 3), sort_on_cpu(many, ones, 3, 3));
}

TEST_F(SortTest, NoTokensAndNoRows) {
  const Sorted none = sort_on_gpu({}, {}, 4, 7);
  EXPECT_EQ(none.offsets, std::vector<std::int64_t>(8, 0));
  const Sorted empty = sort_on_gpu({-1, -1, 3, -1}, {1, 1, 0, 1}, 2, 5);
  EXPECT_EQ(empty.offsets, std::vector<std::int64_t>(6, 0));
  EXPECT_EQ(empty.slot_to_row, std::vector<std::int32_t>(4, -1));
}

TEST_F(SortTest, IdsOutOfRangeAreReportedAndLeftOut) {
  for (const std::int64_t tokens : {4, 3000}) {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * 2), 1);
    const std::vector<float> weights(ids.size(), 1.0f);
    ids[3] = 5;
    ids[5] = -2;
    ids[6] = INT32_MAX;
    ids[7] = INT32_MIN;
    const Sorted got = sort_on_gpu(ids, weights, 2, 5);
    EXPECT_EQ(got.bad_id, 3u);  // token 1, slot 1
    for (const std::size_t i : {3u, 5u, 6u, 7u}) ids[i] = -1;
    expect_same(got, sort_on_cpu(ids, weights, 2, 5));
  }
}

TEST_F(SortTest, RefusesWhatItCannotHold) {
  EXPECT_EQ(sort({.tokens = 1, .top_k = 1, .experts = 1025}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(sort({.tokens = std::int64_t{1} << 30, .top_k = 2, .experts = 8}, nullptr),
            cudaErrorInvalidValue);
  RowTile tile;
  std::int32_t count = 0;
  const auto with_tiles = [&](std::int64_t tokens, std::int32_t* number, int rows) {
    return sort({.tokens = tokens,
                 .top_k = 1,
                 .experts = 8,
                 .row_tiles = &tile,
                 .num_row_tiles = number,
                 .tile_rows = rows},
                nullptr);
  };
  EXPECT_EQ(with_tiles(kOnePartPairs + 1, &count, 8), cudaErrorInvalidValue);
  EXPECT_EQ(with_tiles(1, nullptr, 8), cudaErrorInvalidValue);
  EXPECT_EQ(with_tiles(1, &count, 0), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace megamoe::cuda
