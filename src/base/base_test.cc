#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/aligned_buffer.h"
#include "base/cgroup.h"
#include "base/check.h"
#include "base/median.h"
#include "base/memory.h"
#include "base/parallel.h"
#include "megamoe/types.h"

namespace megamoe {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

TEST(Check, FailsWithCodeAndMessage) {
  try {
    fail(ErrorCode::kNotFound, "expected {}, got {}", 3, "x");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
    EXPECT_STREQ(error.what(), "expected 3, got x");
    return;
  }
  FAIL();
}

TEST(Check, InternalChecksNameThePlace) {
  try {
    MEGAMOE_CHECK(1 + 1 == 3);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    EXPECT_NE(std::string_view(error.what()).find("1 + 1 == 3"), std::string_view::npos);
    EXPECT_NE(std::string_view(error.what()).find("base_test.cc"), std::string_view::npos);
  }
}

TEST(Check, SizesDoNotWrapAround) {
  EXPECT_EQ(checked_mul(std::int64_t{1} << 31, std::int64_t{1} << 31), std::int64_t{1} << 62);
  EXPECT_EQ(checked_mul(kMax, 1), kMax);
  EXPECT_EQ(checked_add(kMax - 1, 1), kMax);
  EXPECT_THROW(checked_mul(std::int64_t{1} << 32, std::int64_t{1} << 31), Error);
  EXPECT_THROW(checked_mul(std::int64_t{1} << 32, std::int64_t{1} << 32), Error);
  EXPECT_THROW(checked_add(kMax, 1), Error);
}

TEST(AlignedBuffer, IsAlignedAndMoves) {
  for (const std::int64_t count : {1, 3, 16, 17, 1000, (1 << 20) + 1}) {
    AlignedBuffer<float> buffer(count);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % kCacheLine, 0u);
    EXPECT_EQ(buffer.size(), count);
    for (std::int64_t i = 0; i < count; ++i) buffer[i] = static_cast<float>(i);
    float* const data = buffer.data();
    const AlignedBuffer<float> moved = std::move(buffer);
    EXPECT_EQ(moved.data(), data);
    EXPECT_EQ(moved[count - 1], static_cast<float>(count - 1));
  }
  EXPECT_EQ(AlignedBuffer<double>(0).data(), nullptr);
  EXPECT_EQ(AlignedBuffer<double>().size(), 0);
}

TEST(Median, IsTheMiddleOrTheMeanOfTheMiddleTwo) {
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({5, 1, 3}), 3);
  EXPECT_EQ(median({8, 1, 5, 3}), 4);
  EXPECT_EQ(median({2, 2, 1, 2}), 2);
  EXPECT_THROW(median({}), Error);
}

TEST(Memory, IsThereAndFinite) {
  EXPECT_GT(available_memory(), 1 << 20);
  EXPECT_LT(available_memory(), std::int64_t{1} << 50);
  EXPECT_GE(last_level_cache(), 32 << 10);
  EXPECT_LT(last_level_cache(), std::int64_t{1} << 40);
}

class Cgroup : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::remove_all(root_); }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  std::optional<double> quota() { return cpu_quota(cgroup_folders("cpu", root_ / "groups", root_ / "self")); }

  const std::filesystem::path root_ =
      std::filesystem::temp_directory_path() / ("megamoe-cgroup-" + std::to_string(getpid()));
};

TEST_F(Cgroup, TheLeastQuotaOfTheGroupsAroundCounts) {
  EXPECT_EQ(quota(), std::nullopt);
  write("self", "0::/slice/service\n");
  EXPECT_EQ(quota(), std::nullopt);
  write("groups/cpu.max", "max 100000\n");
  write("groups/slice/service/cpu.max", "max 100000\n");
  EXPECT_EQ(quota(), std::nullopt);
  write("groups/slice/cpu.max", "250000 100000\n");
  EXPECT_EQ(quota(), 2.5);
  write("groups/slice/service/cpu.max", "400000 100000\n");
  EXPECT_EQ(quota(), 2.5);
  write("groups/slice/service/cpu.max", "50000 100000\n");
  EXPECT_EQ(quota(), 0.5);
  write("groups/other/cpu.max", "1000 100000\n");
  EXPECT_EQ(quota(), 0.5);
}

TEST_F(Cgroup, VersionOneHasAFolderForEachController) {
  write("self", "4:memory:/box\n3:cpu,cpuacct:/box\n2:cpuset:/\nnonsense\n");
  write("groups/cpu/cpu.cfs_quota_us", "-1\n");
  write("groups/cpu/cpu.cfs_period_us", "100000\n");
  write("groups/memory/box/cpu.cfs_quota_us", "100000\n");
  write("groups/memory/box/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota(), std::nullopt);
  write("groups/cpu/box/cpu.cfs_quota_us", "300000\n");
  write("groups/cpu/box/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota(), 3.0);
}

TEST(AlignedBuffer, RefusesSizesThatOverflow) {
  EXPECT_THROW(AlignedBuffer<double>{kMax / 4}, Error);
  EXPECT_THROW(AlignedBuffer<std::uint8_t>{kMax}, Error);
}

class Parallel : public ::testing::Test {
 protected:
  void TearDown() override { set_num_threads(0); }
};

TEST_F(Parallel, VisitsEachIndexOnce) {
  for (const int threads : {1, 2, 3, 64}) {
    set_num_threads(threads);
    for (const std::int64_t count : {0, 1, 2, 63, 64, 65, 1000}) {
      for (const std::int64_t grain : {-1, 0, 1, 7, 64, 5000}) {
        std::vector<std::atomic<int>> visits(static_cast<std::size_t>(count));
        parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end) {
          ASSERT_LT(begin, end);
          for (std::int64_t i = begin; i < end; ++i) ++visits[static_cast<std::size_t>(i)];
        });
        for (const auto& n : visits) ASSERT_EQ(n, 1) << threads << " " << count << " " << grain;
      }
    }
  }
}

TEST_F(Parallel, NegativeCountsDoNothing) {
  parallel_for(-5, 1, [](std::int64_t, std::int64_t) { FAIL(); });
}

TEST_F(Parallel, NestedCallsRunInPlace) {
  std::atomic<std::int64_t> sum{0};
  parallel_for(8, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      parallel_for(10, 1, [&](std::int64_t b, std::int64_t e) { sum += e - b; });
    }
  });
  EXPECT_EQ(sum, 80);
}

TEST_F(Parallel, RethrowsWhatABodyThrows) {
  for (const int threads : {1, 2}) {
    set_num_threads(threads);
    EXPECT_THROW(parallel_for(100, 1,
                              [](std::int64_t begin, std::int64_t) {
                                if (begin == 0) throw std::runtime_error("body");
                              }),
                 std::runtime_error);
  }
}

TEST_F(Parallel, OfSeveralExceptionsTheFirstInOrderIsRethrown) {
  for (int run = 0; run < 50; ++run) {
    try {
      parallel_for(64, 1, [](std::int64_t begin, std::int64_t) {
        if (begin >= 3) throw std::runtime_error(std::to_string(begin));
      });
      FAIL();
    } catch (const std::runtime_error& error) {
      ASSERT_STREQ(error.what(), "3");
    }
  }
}

TEST_F(Parallel, ThreadCounts) {
  EXPECT_GE(available_cores(), 1);
  EXPECT_EQ(num_threads(), available_cores());
  set_num_threads(1);
  EXPECT_EQ(num_threads(), 1);
  set_num_threads(4 * available_cores());
  EXPECT_EQ(num_threads(), available_cores());
  EXPECT_THROW(set_num_threads(-1), Error);
  EXPECT_EQ(num_threads(), available_cores()) << "a refused count changes nothing";
}

// The first processors, `count` of them, of those that this thread may use.
cpu_set_t first_processors(const cpu_set_t& all, int count) {
  cpu_set_t some;
  CPU_ZERO(&some);
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&some) < count; ++cpu) {
    if (CPU_ISSET(cpu, &all)) CPU_SET(cpu, &some);
  }
  return some;
}

// Helpers that an earlier caller has made follow a later one: to fewer processors, and back to all.
TEST_F(Parallel, RunsWhereTheCallerMay) {
  cpu_set_t all;
  ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  const int processors = CPU_COUNT(&all), cores = available_cores();
  for (const int count : {processors, std::max(1, processors - 1), 1, processors}) {
    const cpu_set_t allowed = first_processors(all, count);
    std::thread([&] {
      ASSERT_EQ(sched_setaffinity(0, sizeof(allowed), &allowed), 0);
      EXPECT_EQ(available_cores(), std::min(count, cores));
      std::atomic<int> elsewhere = 0;
      for (int run = 0; run < 20; ++run) {
        parallel_for(200, 1, [&](std::int64_t, std::int64_t) {
          cpu_set_t own;
          sched_getaffinity(0, sizeof(own), &own);
          elsewhere += CPU_EQUAL(&own, &allowed) ? 0 : 1;
        });
      }
      EXPECT_EQ(elsewhere, 0) << count << " of " << processors;
    }).join();
  }
  EXPECT_EQ(available_cores(), cores);
}

TEST(DTypes, NamesAreInverse) {
  for (int i = 0; i <= static_cast<int>(DType::kC64); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(parse_dtype(to_string(dtype)), dtype);
  }
  EXPECT_EQ(parse_dtype(""), std::nullopt);
  EXPECT_EQ(parse_dtype("f32"), std::nullopt);
}

TEST(DTypes, BytesOfShapes) {
  const auto bytes = [](DType dtype, std::vector<std::int64_t> shape) { return bytes_of(dtype, shape); };
  EXPECT_EQ(bytes(DType::kF32, {}), 4);
  EXPECT_EQ(bytes(DType::kBF16, {3, 5}), 30);
  EXPECT_EQ(bytes(DType::kF4, {2, 3}), 3);
  EXPECT_EQ(bytes(DType::kF4, {3}), std::nullopt);
  EXPECT_EQ(bytes(DType::kF4, {}), std::nullopt);
  EXPECT_EQ(bytes(DType::kF32, {0, 7}), 0);
  EXPECT_EQ(bytes(DType::kF32, {-1}), std::nullopt);
  EXPECT_EQ(bytes(DType::kU8, {std::int64_t{1} << 40, std::int64_t{1} << 40, 0}), std::nullopt);
}

}  // namespace
}  // namespace megamoe
