// Processes, or threads, that compute a part each of one engine. They share a stretch of memory, in which each has two
// places: while one is read, the next exchange is written to the other. Nobody can be two exchanges ahead of another
// rank, for each waits for what all gave.
//
// A rank looks out for the others for a short time, and then gives its core away. From time to time it asks whether
// they still run: one that was killed never comes.
#include "communicator.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace specstep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int MOST_RANKS = 64;
constexpr int64_t PLACE = 512 * 1024;  // bytes that are exchanged at once: half of a second-level cache
constexpr std::chrono::microseconds LOOK_OUT{100}, YIELD{2000}, NAP{50};
constexpr std::chrono::milliseconds CHECK{20};

struct alignas(64) Rank {  // on a line of its own
  std::atomic<uint64_t> given{0};  // exchanges that this rank has given its part of
  std::atomic<int32_t> process{0};  // 0: it has not joined
  std::atomic<int32_t> left{0};
};

struct Shared {
  Rank ranks[MOST_RANKS];
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes share them");

int64_t shared_bytes(int64_t ranks) { return static_cast<int64_t>(sizeof(Shared)) + 2 * ranks * PLACE; }

inline void pause() {
#ifdef __x86_64__
  _mm_pause();
#endif
}

// Whether a process has ended, reaped or not.
bool has_ended(int process) {
  char name[64], text[512];
  std::snprintf(name, sizeof name, "/proc/%d/stat", process);
  std::FILE* file = std::fopen(name, "r");
  if (file == nullptr) return kill(process, 0) != 0 && errno == ESRCH;
  const size_t count = std::fread(text, 1, sizeof text - 1, file);
  std::fclose(file);
  text[count] = 0;
  const char* after = std::strrchr(text, ')');  // of its name, which may hold anything
  return after == nullptr || std::strlen(after) < 3 || after[2] == 'Z' || after[2] == 'X';
}

class Communicator {
 public:
  Communicator(void* memory, int64_t rank, int64_t ranks)
      : count(ranks), shared_(static_cast<Shared*>(memory)), rank_(rank) {
    own().process.store(getpid());
  }
  ~Communicator() {
    own().left.store(1);
    munmap(shared_, shared_bytes(count));
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  void exchange(const char* mine, int64_t bytes, Taken taken, const void* body) {
    for (int64_t begin = 0; begin < bytes; begin += PLACE) {
      const int64_t size = std::min(PLACE, bytes - begin);
      turn_++;
      std::memcpy(place(rank_), mine + begin, size);
      own().given.store(turn_, std::memory_order_release);
      const char* parts[MOST_RANKS];
      for (int64_t other = 0; other < count; other++) {
        wait_for(other);
        parts[other] = place(other);
      }
      taken(body, parts, begin, size);
    }
  }

  const int64_t count;  // of ranks

 private:
  Rank& own() { return shared_->ranks[rank_]; }
  char* place(int64_t rank) {
    return reinterpret_cast<char*>(shared_ + 1) + (static_cast<int64_t>(turn_ % 2) * count + rank) * PLACE;
  }

  void wait_for(int64_t other) const {
    const Rank& rank = shared_->ranks[other];
    const auto came = [&] { return rank.given.load(std::memory_order_acquire) >= turn_; };
    const auto begin = Clock::now();
    auto checked = begin;
    for (int64_t looks = 0; !came(); looks++) {
      if (looks % 64 != 0) {
        pause();
        continue;
      }
      const auto now = Clock::now();
      if (now - begin > YIELD)
        std::this_thread::sleep_for(NAP);
      else if (now - begin > LOOK_OUT)
        sched_yield();
      if (now - checked < CHECK) continue;
      checked = now;
      const int process = rank.process.load();
      const bool gone = rank.left.load() != 0 || (process != 0 && process != getpid() && has_ended(process));
      if (gone && !came()) throw std::runtime_error("rank " + std::to_string(other) + " has ended");
    }
  }

  Shared* shared_;
  const int64_t rank_;
  uint64_t turn_ = 0;
};

__thread Communicator* current = nullptr;  // of the calling thread

Communicator& here() {
  if (current == nullptr) throw std::runtime_error("no communicator is bound to this thread");
  return *current;
}

}  // namespace

int64_t ranks_here() { return here().count; }

void exchange_bytes(const void* mine, int64_t bytes, Taken taken, const void* body) {
  here().exchange(static_cast<const char*>(mine), bytes, taken, body);
}

}  // namespace specstep

#define EXPORTED extern "C" __attribute__((visibility("default")))

// What kernels/communicator.py calls.
EXPORTED int64_t specstep_communicator_bytes(int64_t ranks) { return specstep::shared_bytes(ranks); }

// memory: a file of so many zeros, which all ranks map. Null where it cannot be mapped.
EXPORTED void* specstep_join_ranks(int file, int64_t rank, int64_t ranks) {
  using namespace specstep;
  if (rank < 0 || rank >= ranks || ranks > MOST_RANKS) return nullptr;
  void* memory = mmap(nullptr, shared_bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return memory == MAP_FAILED ? nullptr : new (std::nothrow) Communicator(memory, rank, ranks);
}

EXPORTED void specstep_bind_ranks(void* communicator) {
  specstep::current = static_cast<specstep::Communicator*>(communicator);
}

EXPORTED void specstep_leave_ranks(void* communicator) { delete static_cast<specstep::Communicator*>(communicator); }
