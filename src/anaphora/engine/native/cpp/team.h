// A team of threads that compute one step together: all run the same function and share its loops' iterations.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace anaphora {

// Between steps and at the end of each loop threads wait: first spinning, since most waits are a few microseconds, then
// asleep, since on a machine that does something else too a spinning thread keeps the one it waits for from running.
//
// Its functions are compiled once, for any processor: the paths' own code must not be shared between them.
class Team {
 public:
  using Work = void (*)(void* context, Team& team);

  explicit Team(int num_threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return num_threads_; }

  // Have every thread, the caller's too, run work(context, team); return when all have.
  void run(Work work, void* context);

  // Within run: the first iteration of the current loop that nobody has taken yet; past the last one when all are.
  int64_t claim();

  // Within run: wait until every thread is here; the next loop starts at iteration 0.
  void end_loop();

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> value{0};
  };
  struct alignas(64) Signal {
    std::atomic<uint32_t> value{0};
    void wait_while(uint32_t old);
    void set(uint32_t next);
  };

  void serve();

  const int num_threads_;
  Work work_ = nullptr;
  void* context_ = nullptr;
  bool is_closing_ = false;
  Counter tickets_, arrived_;
  Signal step_, loop_;
  std::vector<std::thread> threads_;
};

}  // namespace anaphora
