// The threads that run commands: the caller and num_threads - 1 workers, all of which run every command of a list and
// meet at a barrier after each one.
//
// Threads spin while they wait for each other and for the next list, since both are mostly near, and sleep once that
// takes long: an idle server takes no processor time, and where other work has taken a thread's core, the thread that
// waits for it leaves its own to whoever can use it.
#include "task.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <immintrin.h>
#include <memory>
#include <new>
#include <vector>

namespace {

constexpr int64_t IDLE_SPIN_NS = 200'000;
constexpr int PAUSES_BEFORE_SLEEPING = 4000;
constexpr int PAUSES_BETWEEN_CLOCKS = 256;

struct Command {
  Entry entry;
  const Slot* arguments;
};

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

class Team {
 public:
  Team(int num_threads, int64_t scratch_bytes, const int32_t* cpus)
      : num_threads_(num_threads), scratch_bytes_(scratch_bytes) {
    workers_.reserve(num_threads);
    for (int thread = 0; thread < num_threads; ++thread) {
      void* scratch = nullptr;
      if (posix_memalign(&scratch, 4096, scratch_bytes) != 0) throw std::bad_alloc();
      scratch_.emplace_back(scratch, &free);
    }
    for (int thread = 1; thread < num_threads; ++thread) {
      pthread_t handle;
      auto* start = new Start{this, thread};
      if (pthread_create(&handle, nullptr, worker, start) != 0) {
        delete start;
        stop();
        throw std::bad_alloc();
      }
      workers_.push_back(handle);
      if (cpus != nullptr) pin(handle, cpus[thread]);
    }
  }

  ~Team() { stop(); }

  void run(const Command* commands, int64_t num_commands, const StepCounters* step) {
    if (num_commands == 0) return;  // no barrier would keep the workers in step
    commands_ = commands;
    num_commands_ = num_commands;
    step_ = step;
    wake();
    run_commands(0);
  }

  static void pin(pthread_t thread, int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread, sizeof set, &set);  // a hint: without it all is right, if slower
  }

 private:
  struct Start {
    Team* team;
    int thread;
  };

  static void* worker(void* argument) {
    const Start start = *static_cast<Start*>(argument);
    delete static_cast<Start*>(argument);
    uint32_t seen = 0;
    for (;;) {
      start.team->wait_for_work(seen);
      ++seen;
      if (start.team->is_stopping_) return nullptr;
      start.team->run_commands(start.thread);
    }
  }

  void wait_for_work(uint32_t seen) {
    int64_t deadline = 0;
    for (int pauses = 1; epoch_.load(std::memory_order_acquire) == seen; ++pauses) {
      _mm_pause();
      if (pauses % PAUSES_BETWEEN_CLOCKS != 0) continue;
      const int64_t now = now_ns();
      if (deadline == 0) deadline = now + IDLE_SPIN_NS;
      if (now < deadline) continue;
      num_idle_.fetch_add(1);
      sleep_while(epoch_, seen);
      num_idle_.fetch_sub(1);
    }
  }

  void wake() {
    epoch_.fetch_add(1);
    if (num_idle_.load() > 0) wake_all(epoch_);
  }

  void run_commands(int thread) {
    const Task task{*step_, thread, num_threads_, next_, scratch_[thread].get(), scratch_bytes_};
    const Command* commands = commands_;
    const int64_t num_commands = num_commands_;
    for (int64_t i = 0; i < num_commands; ++i) {
      commands[i].entry(commands[i].arguments, task);
      barrier();
    }
  }

  void barrier() {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
      num_arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      round_.store(round + 1);
      if (num_sleeping_at_barrier_.load() > 0) wake_all(round_);
      return;
    }
    for (int pauses = 0; round_.load(std::memory_order_acquire) == round; ++pauses) {
      if (pauses < PAUSES_BEFORE_SLEEPING) {
        _mm_pause();
        continue;
      }
      // Counted before it sleeps, and asleep only if the round is still the same: no wake-up is missed.
      num_sleeping_at_barrier_.fetch_add(1);
      sleep_while(round_, round);
      num_sleeping_at_barrier_.fetch_sub(1);
    }
  }

  static void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  }
  void wake_all(std::atomic<uint32_t>& word) const {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, num_threads_, nullptr, nullptr, 0);
  }

  void stop() {
    is_stopping_ = true;
    wake();
    for (pthread_t handle : workers_) pthread_join(handle, nullptr);
    workers_.clear();
  }

  const int num_threads_;
  std::vector<pthread_t> workers_;
  int64_t scratch_bytes_;
  std::vector<std::unique_ptr<void, decltype(&free)>> scratch_;
  const Command* commands_ = nullptr;
  int64_t num_commands_ = 0;
  const StepCounters* step_ = nullptr;
  std::atomic<bool> is_stopping_{false};
  // Each on a cache line of its own: they are written while others spin.
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> num_idle_{0};
  std::atomic<int> num_sleeping_at_barrier_{0};
};

}  // namespace

extern "C" {

// cpus [num_threads]: where the workers run, the first of them being the caller's; null leaves that to the system.
// Null where there is no memory or no thread.
Team* team_new(int num_threads, int64_t scratch_bytes, const int32_t* cpus) {
  try {
    return new Team(num_threads, scratch_bytes, cpus);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void team_run(Team* team, const Command* commands, int64_t num_commands, const StepCounters* step) {
  team->run(commands, num_commands, step);
}

void team_delete(Team* team) { delete team; }

void pin_this_thread(int cpu) { Team::pin(pthread_self(), cpu); }

}
