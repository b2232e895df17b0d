#include "libs/base/task.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <vector>

namespace conclave {
namespace {

TEST(Task, CallsWhatItHoldsWhateverItsSize) {
  int sum = 0;
  const Task small = [&sum] { ++sum; };
  std::array<int, 100> many;
  many.fill(2);
  const Task large = [&sum, many] { sum += many[99]; };
  std::function<void()> function = [&sum] { sum += 10; };
  const Task wrapped = function;
  small();
  large();
  large();
  wrapped();
  EXPECT_EQ(sum, 15);
}

TEST(Task, MovesAndEndsWhatItHoldsOnce) {
  const auto counted = std::make_shared<int>(0);
  for (const bool large : {false, true}) {
    std::array<char, 200> ballast = {};
    Task task =
        large ? Task([counted, ballast] { *counted += 1 + ballast[0]; }) : Task([counted] { ++*counted; });
    EXPECT_EQ(counted.use_count(), 2);
    Task other = std::move(task);
    EXPECT_FALSE(task);
    EXPECT_EQ(counted.use_count(), 2);
    other();
    std::vector<Task> list;
    list.push_back(std::move(other));
    for (int i = 0; i < 10; ++i) list.emplace_back([] {});  // grows
    list[0]();
    EXPECT_EQ(counted.use_count(), 2);
    list[0] = Task([] {});
    EXPECT_EQ(counted.use_count(), 1);
    list[0] = nullptr;
    EXPECT_FALSE(list[0]);
  }
  EXPECT_EQ(*counted, 4);
}

// What a closure holds may ask after the task while it goes.
TEST(Task, IsEmptyBeforeItsClosureEnds) {
  struct Asks {
    Task* task;
    bool* seen;
    ~Asks() { *seen = *seen || (task != nullptr && !*task); }
  };
  bool seen = false;
  Task task;
  auto asks = std::make_shared<Asks>(Asks{&task, &seen});
  seen = false;
  task = [asks] {};
  asks.reset();
  task = nullptr;
  EXPECT_TRUE(seen);
}

TEST(Task, HoldsWhatOnlyMoves) {
  auto value = std::make_unique<int>(7);
  int got = 0;
  const Task task = [value = std::move(value), &got] { got = *value; };
  task();
  EXPECT_EQ(got, 7);
}

}  // namespace
}  // namespace conclave
