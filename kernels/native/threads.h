// Splits work over a few threads of our own: torch's OpenMP pool can't be shared by a plain library.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

// One caller at a time (the engine thread). Workers sleep between jobs: cores may be shared with others.
class Pool {
 public:
  void resize(int threads) {
    stop();
    for (int i = 1; i < threads; i++) workers_.emplace_back([this] { work(); });
  }

  int size() const { return int(workers_.size()) + 1; }

  // Run task(context, i) for every i < count; returns when all are done.
  void run(int64_t count, void (*task)(void*, int64_t), void* context) {
    if (workers_.empty() || count < 2) {
      for (int64_t i = 0; i < count; i++) task(context, i);
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      task_ = task;
      context_ = context;
      count_ = count;
      next_ = 0;
      busy_ = int(workers_.size());
      generation_++;
    }
    wake_.notify_all();
    drain();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

  // No destructor: at exit the threads end with the process, and joining them then could hang it.
 private:
  void drain() {
    for (int64_t i = next_++; i < count_; i = next_++) task_(context_, i);
  }

  void work() {
    uint64_t seen = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
        if (stopping_) return;
        seen = generation_;
      }
      drain();
      std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
    generation_ = 0;
  }

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  void (*task_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  std::atomic<int64_t> next_{0};
  int busy_ = 0;
  uint64_t generation_ = 0;
  bool stopping_ = false;
};

inline Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed, see above
  return *instance;
}

template <typename Task>
static inline void parallel(int64_t count, Task&& task) {
  pool().run(count, [](void* context, int64_t i) { (*static_cast<Task*>(context))(i); }, &task);
}

// Memory that a thread keeps from call to call; `slot` tells buffers apart that are in use together.
inline float* scratch(int slot, int64_t floats) {
  thread_local std::vector<float> buffers[8];
  auto& buffer = buffers[slot];
  if (int64_t(buffer.size()) < floats) buffer.resize(floats);
  return buffer.data();
}
