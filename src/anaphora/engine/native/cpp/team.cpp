#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace anaphora {
namespace {

constexpr int SPINS = 4000;  // about 100 microseconds

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

void Team::Signal::wait_while(uint32_t old) {
  for (int spin = 0; spin < SPINS; ++spin) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  value.wait(old, std::memory_order_acquire);
}

void Team::Signal::set(uint32_t next) {
  value.store(next, std::memory_order_release);
  value.notify_all();
}

Team::Team(int num_threads) : num_threads_(num_threads) {
  for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this] { serve(); });
}

Team::~Team() {
  is_closing_ = true;
  step_.set(step_.value.load() + 1);
  for (std::thread& thread : threads_) thread.join();
}

void Team::serve() {
  for (uint32_t step = 0;; ++step) {
    step_.wait_while(step);
    if (is_closing_) return;
    work_(context_, *this);
    end_loop();
  }
}

void Team::run(Work work, void* context) {
  work_ = work;
  context_ = context;
  step_.set(step_.value.load() + 1);
  work(context, *this);
  end_loop();
}

int64_t Team::claim() { return tickets_.value.fetch_add(1, std::memory_order_relaxed); }

void Team::end_loop() {
  const uint32_t loop = loop_.value.load(std::memory_order_acquire);
  if (arrived_.value.fetch_add(1, std::memory_order_acq_rel) + 1 < num_threads_) {
    loop_.wait_while(loop);
    return;
  }
  // The last one here: nobody else looks at these until the signal.
  arrived_.value.store(0, std::memory_order_relaxed);
  tickets_.value.store(0, std::memory_order_relaxed);
  loop_.set(loop + 1);
}

}  // namespace anaphora
