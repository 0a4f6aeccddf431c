// The CPU's share of moe_aiter between matrix products.  Plain pybind11 on NumPy views: no libtorch, so it builds in
// seconds and does not break when torch changes.  bfloat16 comes as uint16.  Every function checks, then computes
// without the GIL; results do not depend on the number of threads.  Out of memory is a MemoryError in Python.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "glu.h"
#include "system.h"
#include "rows.h"

namespace py = pybind11;
using host::bfloat16;
template <class T>
using Array = py::array_t<T, py::array::c_style>;
using Indices = Array<int32_t>;
using Weights = std::optional<Array<float>>;

constexpr int64_t GRAIN = 16384;  // elements that are worth the waking of a thread

static int64_t grain(int64_t columns) { return std::max<int64_t>(1, GRAIN / std::max<int64_t>(columns, 1)); }

static void require(bool holds, const std::string& what) {
  if (!holds) throw py::value_error(what);
}

static void require_axes(const char* name, const py::array& x, py::ssize_t axes) {
  require(x.ndim() == axes,
          std::string(name) + " has " + std::to_string(x.ndim()) + " axes instead of " + std::to_string(axes));
}

static void require_equal(const char* what, int64_t size, const char* other, int64_t expected) {
  require(size == expected,
          std::string(what) + " is " + std::to_string(size) + " but " + other + " is " + std::to_string(expected));
}

// Indices must lie below `limit`; a negative one means a dropped row.
static void require_below(const char* name, const Indices& x, int64_t limit) {
  const int32_t* const data = x.data();
  int32_t highest = -1;
  for (py::ssize_t i = 0; i < x.size(); ++i) highest = std::max(highest, data[i]);
  require(highest < limit,
          std::string(name) + " holds " + std::to_string(highest) + " but must stay below " + std::to_string(limit));
}

// Indices of rows that a group counts: none of them can be dropped.
static void require_within(const char* name, const Indices& x, int64_t limit) {
  require_below(name, x, limit);
  const int32_t* const data = x.data();
  int32_t lowest = 0;
  for (py::ssize_t i = 0; i < x.size(); ++i) lowest = std::min(lowest, data[i]);
  require(lowest >= 0, std::string(name) + " holds " + std::to_string(lowest) + " in a row that a group counts");
}

static const float* data(const Weights& weights) { return weights ? weights->data() : nullptr; }

template <class Id>
static void sort_by_expert(Array<Id> ids, Indices order, Indices rank, Indices group_sizes) {
  require_equal("the size of order", order.size(), "that of expert_ids", ids.size());
  require_equal("the size of rank", rank.size(), "that of expert_ids", ids.size());
  int32_t *const to_order = order.mutable_data(), *const to_rank = rank.mutable_data();
  int32_t* const sizes = group_sizes.mutable_data();
  const Id* const from = ids.data();
  Id highest;
  {
    py::gil_scoped_release nogil;
    highest = host::sort_by_expert(from, to_order, to_rank, sizes, ids.size(), group_sizes.size());
  }
  require(highest < group_sizes.size(), "expert_ids holds " + std::to_string(highest) + " but num_experts is " +
                                            std::to_string(group_sizes.size()));
}

// The checks that moving rows between tokens (T, H) and rows (n, H) share.
template <class T, class U>
static void check_move(const Array<T>& tokens, const Array<U>& rows, const Indices& order, const Weights& weights,
                       int64_t k) {
  require_axes("tokens", tokens, 2);
  require_axes("rows", rows, 2);
  require_equal("the width of rows", rows.shape(1), "that of the tokens", tokens.shape(1));
  require_equal("the number of rows", rows.shape(0), "the size of order", order.size());
  require(k >= 1, "top_k must be at least 1");
  const int64_t choices = tokens.shape(0) * k;
  if (weights) require_equal("the size of routing_weights", weights->size(), "T * k", choices);
  require_below("order", order, choices);
}

template <class T>
static void gather(Array<T> x, Indices order, Weights weights, Array<T> out, int64_t k, int threads) {
  check_move(x, out, order, weights, k);
  const int64_t H = x.shape(1);
  T* const to = out.mutable_data();
  py::gil_scoped_release nogil;
  host::parallel_for(order.size(), grain(H), threads, [&](int64_t begin, int64_t end) {
    host::gather(x.data(), order.data(), data(weights), to, begin, end, H, k);
  });
}

template <class T>
static void accumulate(Array<T> rows, Indices order, Weights weights, Array<float> out, int64_t k, int threads) {
  check_move(out, rows, order, weights, k);
  const int64_t H = rows.shape(1), n = order.size();
  const int32_t* const choices = order.data();
  float* const to = out.mutable_data();
  // Rows of one token stay in one part, so that no two threads write to it.  An expert's rows are in the order of
  // their tokens, so those of one token follow each other; anything else is left to one thread.
  if (!std::is_sorted(choices, choices + n)) threads = 1;
  const auto border = [&](int64_t r) {
    while (r > 0 && r < n && choices[r] / k == choices[r - 1] / k) ++r;
    return r;
  };
  py::gil_scoped_release nogil;
  host::parallel_for(n, grain(H), threads, [&](int64_t begin, int64_t end) {
    host::accumulate(rows.data(), choices, data(weights), to, border(begin), border(end), H, k);
  });
}

template <class T>
static void unpermute(Array<T> rows, Indices rank, Weights weights, Array<T> out, int threads) {
  require_axes("rows", rows, 2);
  require_axes("rank", rank, 2);
  require_axes("out", out, 2);
  require_equal("the width of rows", rows.shape(1), "that of out", out.shape(1));
  require_equal("the length of out", out.shape(0), "that of rank", rank.shape(0));
  if (weights) require_equal("the size of routing_weights", weights->size(), "that of rank", rank.size());
  require_below("rank", rank, rows.shape(0));
  const int64_t H = rows.shape(1), k = rank.shape(1);
  T* const to = out.mutable_data();
  py::gil_scoped_release nogil;
  host::parallel_for(rank.shape(0), grain(H * k), threads, [&](int64_t begin, int64_t end) {
    host::unpermute(rows.data(), rank.data(), data(weights), to, begin, end, H, k);
  });
}

template <class T>
static void row_dots(Array<T> rows, Array<T> x, Indices rank, Array<float> out, int threads) {
  require_axes("rows", rows, 2);
  require_axes("x", x, 2);
  require_axes("rank", rank, 2);
  require_equal("the width of rows", rows.shape(1), "that of x", x.shape(1));
  require_equal("the length of x", x.shape(0), "that of rank", rank.shape(0));
  require_equal("the size of out", out.size(), "that of rank", rank.size());
  require_below("rank", rank, rows.shape(0));
  const int64_t H = rows.shape(1), k = rank.shape(1);
  float* const to = out.mutable_data();
  py::gil_scoped_release nogil;
  host::parallel_for(x.shape(0), grain(H * k), threads, [&](int64_t begin, int64_t end) {
    host::row_dots(rows.data(), x.data(), rank.data(), to, begin, end, H, k);
  });
}

template <class T>
static void column_sums(Array<T> rows, Indices order, Weights weights, Array<float> out, int threads) {
  require_axes("rows", rows, 2);
  require_equal("the size of out", out.size(), "the width of rows", rows.shape(1));
  require_equal("the number of rows", rows.shape(0), "the size of order", order.size());
  if (weights) require_within("order", order, weights->size());
  const int64_t n = rows.shape(0), H = rows.shape(1);
  float* const to = out.mutable_data();
  py::gil_scoped_release nogil;
  host::parallel_for(H, std::max<int64_t>(64, grain(n)), threads, [&](int64_t begin, int64_t end) {
    host::column_sums(rows.data(), order.data(), data(weights), to, n, begin, end, H);
  });
}

template <class T>
static void topk(Array<T> scores, Array<T> values, Array<int64_t> ids, int threads) {
  require_axes("scores", scores, 2);
  require_axes("values", values, 2);
  const int64_t num_tokens = scores.shape(0), E = scores.shape(1), k = values.shape(1);
  require_equal("the length of values", values.shape(0), "that of scores", num_tokens);
  require_equal("the size of ids", ids.size(), "that of values", values.size());
  require(k <= E, "values has more columns than scores");
  T* const to = values.mutable_data();
  int64_t* const to_ids = ids.mutable_data();
  py::gil_scoped_release nogil;
  host::parallel_for(num_tokens, grain(E), threads, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> keys(E);
    host::topk(scores.data(), to, to_ids, keys.data(), begin, end, E, k);
  });
}

// Calls fn with the activation of that name, whose numbers are `limits`.
template <class Fn>
static void with_activation(const std::string& name, const std::vector<float>& limits, const Fn& fn) {
  const int64_t expected = name == "silu_limit" ? 4 : name == "silu_softcap" ? 2 : 0;
  require_equal("the number of limits", limits.size(), "that of this activation", expected);
  if (name == "silu") return fn(host::Silu{});
  if (name == "gelu") return fn(host::Gelu{});
  if (name == "gelu_tanh") return fn(host::GeluTanh{});
  if (name == "relu") return fn(host::Relu{});
  if (name == "relu2") return fn(host::Relu2{});
  if (name == "silu_limit") return fn(host::SiluLimit{limits[0], limits[1], limits[2], limits[3]});
  if (name == "silu_softcap") return fn(host::SiluSoftcap{limits[0], limits[1]});
  throw py::value_error("unknown activation " + name);
}

// The layout of z (n, parts * I) over a (n, I).
template <class T>
static host::Layout check_glu(const Array<T>& z, const Array<T>& a, bool gated, bool interleaved) {
  require_axes("z", z, 2);
  require_axes("the activation", a, 2);
  require_equal("the length of z", z.shape(0), "that of the activation", a.shape(0));
  require_equal("the width of z", z.shape(1), "parts * I", (gated ? 2 : 1) * a.shape(1));
  return !gated ? host::Layout::plain : interleaved ? host::Layout::pairs : host::Layout::halves;
}

// `upcoming` is what the caller reads next, as pairs of an address and a number of bytes.  Each row asks for a little of
// it, while the core is busy with arithmetic, and the matrix products that follow find it in cache.
template <class T>
static void glu(Array<T> z, Array<T> out, const std::string& activation, const std::vector<float>& limits, bool gated,
                bool interleaved, int threads, const std::vector<std::pair<uintptr_t, int64_t>>& upcoming) {
  const host::Layout layout = check_glu(z, out, gated, interleaved);
  const int64_t I = out.shape(1), rows = out.shape(0);
  T* const to = out.mutable_data();
  std::vector<host::Upcoming> memory;
  for (const auto& [address, bytes] : upcoming) memory.push_back({reinterpret_cast<const char*>(address), bytes});
  with_activation(activation, limits, [&](auto f) {
    py::gil_scoped_release nogil;
    host::parallel_for(rows, grain(4 * I), threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        for (const host::Upcoming& m : memory) m.ask(r, rows);
        host::glu(f, layout, z.data(), to, r, r + 1, I);
      }
    });
  });
}

template <class T>
static void glu_backward(Array<T> dout, Array<T> z, Array<T> dz, const std::string& activation,
                         const std::vector<float>& limits, bool gated, bool interleaved, int threads) {
  const host::Layout layout = check_glu(z, dout, gated, interleaved);
  check_glu(dz, dout, gated, interleaved);
  const int64_t I = dout.shape(1);
  const host::GluGradient<T> gradient{dout.data(), z.data(), dz.mutable_data(), nullptr, nullptr, nullptr, nullptr};
  with_activation(activation, limits, [&](auto f) {
    py::gil_scoped_release nogil;
    host::parallel_for(dout.shape(0), grain(4 * I), threads, [&](int64_t begin, int64_t end) {
      host::glu_gradient<decltype(f), false>(f, layout, gradient, begin, end, I);
    });
  });
}

// One block of the experts' backward: dz, weights * activation, and the gradient of the routing weights.
template <class T>
static void weighted_glu_backward(Array<T> dout, Array<T> z, Indices order, Array<float> weights, Array<T> dz,
                                  Array<T> weighted, Array<float> dweights, const std::string& activation,
                                  const std::vector<float>& limits, bool gated, bool interleaved, int threads) {
  const host::Layout layout = check_glu(z, dout, gated, interleaved);
  check_glu(dz, dout, gated, interleaved);
  check_glu(z, weighted, gated, interleaved);
  require_equal("the size of order", order.size(), "the length of z", z.shape(0));
  require_equal("the size of dweights", dweights.size(), "that of routing_weights", weights.size());
  require_within("order", order, weights.size());
  const int64_t I = dout.shape(1);
  const host::GluGradient<T> gradient{dout.data(),    z.data(),
                                      dz.mutable_data(), order.data(),
                                      weights.data(), weighted.mutable_data(),
                                      dweights.mutable_data()};
  with_activation(activation, limits, [&](auto f) {
    py::gil_scoped_release nogil;
    host::parallel_for(dout.shape(0), grain(4 * I), threads, [&](int64_t begin, int64_t end) {
      host::glu_gradient<decltype(f), true>(f, layout, gradient, begin, end, I);
    });
  });
}

template <class T>
static void bind(py::module_& m) {
  const auto exact = [](const char* name) { return py::arg(name).noconvert(); };
  m.def("gather", &gather<T>, exact("x"), exact("order"), exact("routing_weights"), exact("out"), py::arg("top_k"),
        py::arg("threads"));
  m.def("accumulate", &accumulate<T>, exact("rows"), exact("order"), exact("routing_weights"), exact("out"),
        py::arg("top_k"), py::arg("threads"));
  m.def("unpermute", &unpermute<T>, exact("rows"), exact("rank"), exact("routing_weights"), exact("out"),
        py::arg("threads"));
  m.def("row_dots", &row_dots<T>, exact("rows"), exact("x"), exact("rank"), exact("out"), py::arg("threads"));
  m.def("column_sums", &column_sums<T>, exact("rows"), exact("order"), exact("routing_weights"), exact("out"),
        py::arg("threads"));
  m.def("topk", &topk<T>, exact("scores"), exact("values"), exact("ids"), py::arg("threads"));
  m.def("glu", &glu<T>, exact("z"), exact("out"), py::arg("activation"), py::arg("limits"), py::arg("gated"),
        py::arg("interleaved"), py::arg("threads"), py::arg("upcoming") = std::vector<std::pair<uintptr_t, int64_t>>());
  m.def("glu_backward", &glu_backward<T>, exact("dout"), exact("z"), exact("dz"), py::arg("activation"),
        py::arg("limits"), py::arg("gated"), py::arg("interleaved"), py::arg("threads"));
  m.def("weighted_glu_backward", &weighted_glu_backward<T>, exact("dout"), exact("z"), exact("order"),
        exact("routing_weights"), exact("dz"), exact("weighted"), exact("dweights"), py::arg("activation"),
        py::arg("limits"), py::arg("gated"), py::arg("interleaved"), py::arg("threads"));
}

// fn(i, worker) for i in [0, n), begun in this order, each by the next of `workers` threads that is free; torch's loops
// inside run in that thread.  The first exception keeps the others from beginning, and is thrown.
static void for_each(int64_t n, int workers, const py::function& fn) {
  std::atomic<int64_t> next{0};
  std::atomic<int> worker{0};
  py::gil_scoped_release nogil;
  host::in_threads(workers, [&] {
    const int me = worker.fetch_add(1);
    py::gil_scoped_acquire gil;
    for (int64_t i; (i = next.fetch_add(1)) < n;) try {
        fn(i, me);
      } catch (...) {
        next = n;
        throw;
      }
  });
}

// A C-contiguous array over the memory of `owner`, which the array keeps alive.
template <class T>
static py::array view(uintptr_t address, const std::vector<py::ssize_t>& shape, const py::object& owner) {
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  require(address != 0 || empty, "the tensor has elements but no memory: it is a fake tensor, or its storage was freed");
  static T nothing;  // NumPy would allocate where the address is null
  return Array<T>(shape, address ? reinterpret_cast<const T*>(address) : &nothing, owner);
}

static void use_huge_pages(uintptr_t address, size_t bytes) {
  host::use_huge_pages(reinterpret_cast<void*>(address), bytes);
}

template <class T>
static void bind_view(py::module_& m, const char* name) {
  m.def(name, &view<T>, py::arg("address"), py::arg("shape"), py::arg("owner"));
}

template <class Id>
static void bind_sort(py::module_& m) {
  m.def("sort_by_expert", &sort_by_expert<Id>, py::arg("expert_ids").noconvert(), py::arg("order").noconvert(),
        py::arg("rank").noconvert(), py::arg("group_sizes").noconvert());
}

PYBIND11_MODULE(_host, m) {
  bind_sort<int32_t>(m);
  bind_sort<int64_t>(m);
  bind<float>(m);
  bind<bfloat16>(m);
  m.def("for_each", &for_each, py::arg("n"), py::arg("workers"), py::arg("fn"));
  m.def("use_huge_pages", &use_huge_pages, py::arg("address"), py::arg("bytes"));
  bind_view<float>(m, "view_float32");
  bind_view<bfloat16>(m, "view_bfloat16");
  bind_view<int32_t>(m, "view_int32");
  bind_view<int64_t>(m, "view_int64");
}
