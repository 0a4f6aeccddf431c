// Threads, pages and caches: what a loop needs from the system.
//
// Loops run on several threads: those that torch already has.
//
// An OpenMP thread that has finished its share of a loop spins for milliseconds before it sleeps.  A second pool of
// threads beside torch's would have to fight it for the cores, between every two matrix products.  So the loops
// here are given to the OpenMP runtime that torch has loaded, through the entry point that compilers use; GNU's and
// LLVM's both have it.  Nothing is linked, and without it, as on Windows, a loop runs in the calling thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <sys/mman.h>
#endif

namespace host {

struct OpenMP {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
  void (*set_num_threads)(int) = nullptr;

  OpenMP() {
#if defined(__unix__) || defined(__APPLE__)
    parallel = reinterpret_cast<decltype(parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    set_num_threads = reinterpret_cast<decltype(set_num_threads)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
#endif
  }
};

// Call fn() in each of so many threads at once, if there are threads, where loops of torch's then run in that thread
// alone; in the calling thread otherwise.  An exception must not leave a parallel region, or the process ends: the
// first one is thrown after the region, in the calling thread.
template <class Fn>
void in_threads(int64_t threads, const Fn& fn) {
  static const OpenMP openmp;
  if (threads <= 1 || !openmp.parallel || !openmp.set_num_threads) return fn();
  struct Job {
    const OpenMP& openmp;
    const Fn& fn;
    std::atomic<bool> failed{false};
    std::exception_ptr error{};
  } job{openmp, fn};
  openmp.parallel(
      [](void* data) {
        Job& job = *static_cast<Job*>(data);
        job.openmp.set_num_threads(1);  // until the end of this parallel region, for the thread that calls it
        try {
          job.fn();
        } catch (...) {
          if (!job.failed.exchange(true)) job.error = std::current_exception();
        }
      },
      &job, static_cast<unsigned>(threads), 0);
  if (job.error) std::rethrow_exception(job.error);
}

// fn(begin, end) over [0, n), in at most `threads` parts of at least `grain`; parts run in any order, each once.
template <class Fn>
void parallel_for(int64_t n, int64_t grain, int threads, const Fn& fn) {
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(threads, n / std::max<int64_t>(grain, 1)));
  std::atomic<int64_t> next{0};
  in_threads(parts, [&] {
    for (int64_t part; (part = next.fetch_add(1)) < parts;) fn(n * part / parts, n * (part + 1) / parts);
  });
}

// Ask for huge pages for memory that nothing has touched yet.  A buffer of some tens of MiB is fresh from the kernel
// each time it is allocated, and to be given it in pages of 4 KiB costs as much as a matrix product that fills it.
inline void use_huge_pages(void* memory, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t page = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
  // advice: where the kernel has no huge pages it may fail, and nothing is lost
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  static_cast<void>(memory), static_cast<void>(bytes);
#endif
}

// Memory that will be read soon.
struct Upcoming {
  const char* data;
  int64_t bytes;

  // Ask for the cache lines of part i of n.
  void ask(int64_t i, int64_t n) const {
#if defined(__GNUC__)
    const int64_t lines = (bytes + 63) / 64;
    for (int64_t line = lines * i / n; line < lines * (i + 1) / n; ++line) __builtin_prefetch(data + 64 * line);
#else
    static_cast<void>(i), static_cast<void>(n);
#endif
  }
};

}  // namespace host
