#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace memkv {
namespace {

// One parallel_for, shared by the threads that take part in it.
struct Job {
  const std::function<void(int64_t)>& work;
  const int64_t count;
  std::atomic<int64_t> next{0};
  std::mutex failing{};
  std::exception_ptr failure{};

  void take_part() {
    try {
      for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) work(i);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failing);
      if (!failure) failure = std::current_exception();
      next.store(count);
    }
  }
};

constexpr int kYields = 200;  // some 100 us

class ThreadPool {
 public:
  explicit ThreadPool(int helpers) {
    for (int i = 0; i < helpers; ++i) threads_.emplace_back([this] { serve(); });
  }

  ~ThreadPool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int helpers() const { return int(threads_.size()); }

  void run(Job& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      seats_ = int(std::min<int64_t>(helpers(), job.count - 1));
    }
    wake_.notify_all();
    job.take_part();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = nullptr;  // a helper that wakes only now finds nothing, and sleeps on
    }
    // The helpers' last pieces of work are short: yielding for a while saves being woken.
    for (int i = 0; i < kYields && inside_.load() > 0; ++i) std::this_thread::yield();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return inside_.load() == 0; });
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return closing_ || (job_ != nullptr && seats_ > 0); });
      if (closing_) return;
      Job& job = *job_;
      --seats_;
      inside_.fetch_add(1);
      lock.unlock();
      job.take_part();
      lock.lock();
      if (inside_.fetch_sub(1) == 1) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  Job* job_ = nullptr;
  int seats_ = 0;               // helpers that may still join the job
  std::atomic<int> inside_{0};  // helpers at work on it
  bool closing_ = false;
};

std::mutex owner;  // held by whoever uses or replaces the pool
std::atomic<int> thread_count{0};

// Never destroyed: a process that ends, or a forked child, must not wait for threads.
std::unique_ptr<ThreadPool>& pool() {
  static auto& instance = *new std::unique_ptr<ThreadPool>;
  return instance;
}

void resize(int count) {
  pool() = std::make_unique<ThreadPool>(count - 1);
  thread_count.store(count);
}

void start() {
  if (thread_count.load() == 0) resize(int(std::max(1u, std::thread::hardware_concurrency())));
}

}  // namespace

int num_threads() {
  if (thread_count.load() == 0) {
    const std::lock_guard<std::mutex> lock(owner);
    start();
  }
  return thread_count.load();
}

void set_num_threads(int count) {
  if (count < 1 || count > 1024) {
    throw std::invalid_argument("the number of threads is " + std::to_string(count) +
                                ", not 1 to 1024");
  }
  const std::lock_guard<std::mutex> lock(owner);
  if (count != thread_count.load()) resize(count);
}

void parallel_for(int64_t count, const std::function<void(int64_t)>& work) {
  Job job{work, count};
  const std::unique_lock<std::mutex> lock(owner, std::try_to_lock);
  if (lock.owns_lock() && count > 1) start();
  if (lock.owns_lock() && count > 1 && thread_count.load() > 1) {
    pool()->run(job);
  } else {
    job.take_part();
  }
  if (job.failure) std::rethrow_exception(job.failure);
}

}  // namespace memkv
