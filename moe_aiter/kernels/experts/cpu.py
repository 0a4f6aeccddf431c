"""The experts on a CPU: one expert after the other, from its tokens to its share of the output.

    z = gate_up[e] @ x[token] + gate_up_bias[e]
    out[token] += weight * (down[e] @ f(z) + down_bias[e])

A block of an expert's rows stays in cache from the first step to the last, in scratch memory that all blocks
share.  torch computes the matrix products, C++ or torch the steps between and around them.  Only x, z and the
routing are kept for the backward pass; without z it computes z again.  Sums run in float32, expert by expert,
so two runs give the same bits.

A block's `choices` (n,) int32 are its part of `order`: choice c is token c // k and has weight c of (T, k).
"""

import threading
from collections.abc import Callable
from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor

from ...invariance import batch_invariant
from ...op import Written, define_op, extended, gradients, saved_tensors, takes
from ..base.activations import get_activation
from ..base.check import check_float, sum_dtype, take_rows, wide
from ..base.host import HOST_DTYPES, array, check_built, ext, host, num_threads, saturated, use_huge_pages
from ..grouped.gmm import GroupedInputs, gmm_reference
from ..grouped.tgmm import chosen, matmul_into
from ..rows.permute import UnpermuteInputs, rows_alone, unpermute_reference
from .glu import GluBackwardInputs, glu_backward_reference
from .inputs import ExpertInputs, check_expert_values, check_experts

# blocks, scratch, gradients of weights, order


BLOCK_ROWS = 1024  # what is in work at a time stays in cache; products of fewer rows are slower
FEW_ROWS, SMALL_STEP, STEP = 128, 4, 16  # of the sizes of products


class Block(NamedTuple):
    """Rows [first, last) of one expert, all of them or a part; at least one."""

    number: int  # in the order of the rows
    expert: int
    first: int
    last: int
    starts: bool  # the first block of its expert
    ends: bool  # the last one
    z_first: int  # its rows of z are [z_first, z_last), padded as for products
    z_last: int


def blocks(group_sizes: list[int], rows: int, dtype: torch.dtype) -> list[list[Block]]:
    """For each expert, its rows in even blocks of at most BLOCK_ROWS.

    Sizes that are negative or sum to more than `rows` are clamped.
    """
    experts, number, start, z_first = [], 0, 0, 0
    for expert, size in enumerate(group_sizes):
        size = min(max(size, 0), rows - start)
        count, mine = -(-size // BLOCK_ROWS), []
        for i in range(count):
            first, last = (start + size * n // count for n in (i, i + 1))
            z_last = z_first + padded(last - first, dtype)
            mine.append(Block(number, expert, first, last, i == 0, i == count - 1, z_first, z_last))
            number, z_first = number + 1, z_last
        experts.append(mine)
        start += size
    return experts


def padded(rows: int, dtype: torch.dtype) -> int:
    """Return the padded number of rows for a product of `rows` rows.

    oneDNN, which multiplies 16-bit floats, compiles code for each size that it meets, half a millisecond for
    each of a layer's products.  Experts have other numbers of rows in every step, so the sizes must be few.
    """
    step = 1 if dtype.itemsize != 2 else SMALL_STEP if rows < FEW_ROWS else STEP
    return -(-rows // step) * step


def num_z_rows(rows: int, num_experts: int, dtype: torch.dtype) -> int:
    """The most rows that z may have, with the padding of each block; known without the group sizes."""
    if dtype.itemsize != 2:
        return rows
    blocks = min(rows, num_experts) + rows // BLOCK_ROWS
    return rows + (SMALL_STEP - 1) * blocks + (STEP - SMALL_STEP) * min(blocks, rows // FEW_ROWS)


class Scratch:
    """Buffers for the rows of one block, made at first use and reused by every block of a worker."""

    def __init__(self, like: Tensor, rows: int, view: Callable):
        self.like, self.view, self.buffers, self.returned = like, view, {}, {}
        self.rows = padded(min(rows, BLOCK_ROWS), like.dtype)

    def take(self, name: str, rows: int, columns: int) -> tuple:
        """A buffer's first rows, padded with zeros for products, and without, as the steps see them."""
        if name not in self.buffers:
            if self.returned.get(name):
                self.buffers[name] = self.returned[name].pop()
            else:
                buffer = self.like.new_empty(self.rows, columns)
                self.buffers[name] = buffer, self.view(buffer)
        buffer, view = self.buffers[name]
        end = padded(rows, buffer.dtype)
        if end > rows:
            view[rows:end] = 0
        return buffer[:end], view[:rows]

    def lend(self, name: str) -> Callable[[], None]:
        """Leave the buffer alone until the function returned is called, in any thread."""
        buffer, returned = self.buffers.pop(name), self.returned.setdefault(name, [])
        return lambda: returned.append(buffer)


class WeightGradient:
    """Sums left.T @ right over an expert's blocks, into a fresh gradient or onto a main gradient."""

    def __init__(self, grads: tuple[Tensor, ...], onto_main: bool):
        self.grads, self.onto_main = grads, onto_main
        self.product = self.total = None

    def add(self, block: Block, left: Tensor, right: Tensor) -> None:
        grad = self.grads[block.expert]
        fresh = block.starts and not self.onto_main
        if grad.dtype == left.dtype and (grad.dtype == sum_dtype(grad) or (fresh and block.ends)):
            matmul_into(grad, left.mT, right, None if fresh else grad, by_row=False)
            return
        if self.product is None:
            self.product = left.new_empty(grad.shape)
        matmul_into(self.product, left.mT, right, by_row=False)
        if self.onto_main:
            grad.add_(self.product)
            return
        # rounded once, after the last block
        if self.total is None:
            self.total = grad.new_empty(grad.shape, dtype=sum_dtype(grad))
        if block.starts:
            self.total.copy_(self.product)
        else:
            self.total.add_(self.product)
        if block.ends:
            grad.copy_(self.total)


class InOrder:
    """Run jobs one at a time, in the order of their numbers 0, 1, ..., in whatever order threads add them.

    No thread waits.  If a job is next, the thread that adds the job runs it, and then all that follow it.
    Otherwise the thread that runs the job before it runs it too.
    """

    def __init__(self):
        self.lock, self.jobs, self.next, self.running = threading.Lock(), {}, 0, False

    def add(self, number: int, job: Callable[[], None]) -> None:
        with self.lock:
            self.jobs[number] = job
            if self.running:
                return
            self.running = True
        while True:
            with self.lock:
                job = self.jobs.pop(self.next, None)
                if job is None:
                    self.running = False
                    return
                self.next += 1
            job()


# steps between and around the products of a block


CACHED = 2**20  # bytes of a weight that are worth asking for early: about a core's second cache
SMALL = 2**21  # multiplications: less in one product, and workers would mostly wait for Python


class TorchSteps:
    """In torch, for every dtype: the arithmetic is float32, or float64 for float64."""

    view = staticmethod(torch.Tensor.detach)  # what the other methods take for a tensor

    def __init__(self, routing_weights: Tensor, activation: str, interleaved: bool):
        self.weights, self.top_k = routing_weights.flatten(), routing_weights.shape[1]
        self.act, self.interleaved = get_activation(activation), interleaved

    def prepare(self, *fresh: Tensor) -> None:
        """Called with outputs that nothing has touched yet"""

    def num_workers(self, rows: list[int], multiplications: int) -> int:
        """Return the number of workers for tasks of so many rows, with so many multiplications a row."""
        return 1

    def for_each(self, n: int, workers: int, task: Callable[[int, int], None]) -> None:
        """task(i, worker) for i = 0..n-1, begun in this order"""
        for i in range(n):
            task(i, 0)

    def gather(self, x, choices, out) -> None:
        """out[r] = x[token of r]"""
        torch.index_select(x, 0, choices // self.top_k, out=out)

    def accumulate(self, rows, choices, weighted: bool, out) -> None:
        """out[token of r] += rows[r], or weight of r times that; `out` is wide"""
        rows = wide(rows) * self.weights[choices, None] if weighted else wide(rows)
        out.index_add_(0, choices // self.top_k, rows.to(out.dtype))

    def column_sum(self, rows, choices, weighted: bool, out) -> None:
        """out += the sum of the rows, or of weight times row; `out` is wide"""
        out += (wide(rows) * self.weights[choices, None] if weighted else wide(rows)).sum(0)

    def glu(self, z, out, upcoming: list[Tensor]) -> None:
        """out = f(z); the tensors `upcoming` will be read soon"""
        out.copy_(self.act(wide(z), self.interleaved))

    def glu_backward(self, da, z, choices, out: tuple) -> None:
        """dz, weight * activation, and for each choice <da, activation>; `da` is before the weight"""
        dz, weighted, dweights = out
        da, z, weights = wide(da), wide(z), self.weights[choices, None]
        a = self.act(z, self.interleaved)
        inputs = GluBackwardInputs(da * weights, z, self.act.name, self.interleaved)
        dz.copy_(glu_backward_reference(inputs))
        weighted.copy_(a * weights)
        dweights[choices] = (da * a).sum(1).to(dweights.dtype)


class HostSteps:
    """The elementwise steps in C++, for float32 and bfloat16."""

    view = staticmethod(array)
    prepare = staticmethod(use_huge_pages)

    def __init__(self, routing_weights: Tensor, activation: str, interleaved: bool):
        self.act = *get_activation(activation).host_arguments, interleaved
        self.weights, self.top_k = array(routing_weights.flatten()), routing_weights.shape[1]
        self.threads = num_threads()

    def num_workers(self, rows: list[int], multiplications: int) -> int:
        """Return how many threads take tasks of their own; 1 if all threads share each task instead.

        Threads with tasks of their own never wait for each other; a shared product ends when the last thread
        is done.  But few or uneven tasks leave threads idle, and small ones wait for Python: they are shared.
        """
        uneven = 2 * max(rows, default=0) * self.threads > sum(rows)
        small = sum(rows) * multiplications < len(rows) * SMALL
        # with batch invariance no product may be shared here and not there: oneDNN may split its sums
        return 1 if (uneven or small) and not batch_invariant() else self.threads

    def for_each(self, n: int, workers: int, task: Callable[[int, int], None]) -> None:
        if workers == 1:
            return TorchSteps.for_each(self, n, 1, task)
        self.threads = 1

        def run(i: int, worker: int) -> None:
            with torch.inference_mode():  # the thread knows nothing of what the caller has switched off
                task(i, worker)

        return ext.for_each(n, workers, run)

    def gather(self, x, choices, out) -> None:
        ext.gather(x, choices, None, out, self.top_k, self.threads)

    def accumulate(self, rows, choices, weighted: bool, out) -> None:
        ext.accumulate(rows, choices, self.weights if weighted else None, out, self.top_k, self.threads)

    def column_sum(self, rows, choices, weighted: bool, out) -> None:
        ext.column_sums(rows, choices, self.weights if weighted else None, out, self.threads)

    def glu(self, z, out, upcoming: list[Tensor]) -> None:
        memory = [(x.data_ptr(), x.nbytes) for x in upcoming if x.nbytes <= CACHED and x.is_contiguous()]
        ext.glu(z, out, *self.act, self.threads, memory)

    def glu_backward(self, da, z, choices, out: tuple) -> None:
        ext.weighted_glu_backward(da, z, choices, self.weights, *out, *self.act, self.threads)


class LoopGrads(NamedTuple):
    """The gradients that the backward op returns, in order; or which of them it must compute."""

    x: Tensor | bool
    gate_up: Tensor | bool
    gate_up_bias: Tensor | bool
    down: Tensor | bool
    down_bias: Tensor | bool
    routing_weights: Tensor | bool  # always computed: it comes with dz for nothing


LoopInputs = extended("LoopInputs", ExpertInputs)  # without defaults


LoopBackwardInputs = extended(
    "LoopBackwardInputs",
    NamedTuple("Saved", [("dout", Tensor), ("z", Tensor)]),
    **get_type_hints(LoopInputs)
    | {"gate_up_main_grad": Written | None, "down_main_grad": Written | None, "needs": tuple[bool, ...]},
)


# reference
def expert_loop_reference(i: ExpertInputs) -> tuple[Tensor, Tensor]:
    rows = take_rows(i.x, i.order, i.rank.shape[1])
    z = gmm_reference(GroupedInputs(rows, i.gate_up.mT, i.group_sizes, i.gate_up_bias))
    a = get_activation(i.activation)(z, i.interleaved)
    y = gmm_reference(GroupedInputs(a, i.down.mT, i.group_sizes, i.down_bias))
    out = unpermute_reference(UnpermuteInputs(y, i.order, i.rank, i.routing_weights))
    return out, z if i.save_z else z[:0]


# launcher: one loop, for the steps in C++ and in torch
class Loop:
    """The state that the blocks of one forward or backward pass share."""

    def __init__(self, steps_class: type, i: ExpertInputs):
        self.sums, self.multiply = sum_dtype(i.x), chosen(i.x, i.x, None)
        self.i, self.steps = i, steps_class(i.routing_weights.to(self.sums), i.activation, i.interleaved)
        self.x, self.order = map(self.steps.view, (i.x.contiguous(), saturated(i.order)))
        self.gate_up, self.down = i.gate_up.unbind(0), i.down.unbind(0)
        self.width, self.channels, self.hidden = i.gate_up.shape[1], i.down.shape[2], i.x.shape[1]
        biases = (per_expert(bias, i.x, len(self.down)) for bias in (i.gate_up_bias, i.down_bias))
        self.gate_up_bias, self.down_bias = biases
        self.experts = blocks(i.group_sizes.tolist(), len(i.order), i.x.dtype)
        self.in_order = InOrder()

    def set_tasks(self, tasks: list[list[Block]]) -> None:
        """Decide how many workers share the tasks, which are blocks to take in turn."""
        self.tasks = tasks
        rows = [task[-1].last - task[0].first for task in tasks]
        self.num_workers = self.steps.num_workers(rows, self.width * self.hidden)
        largest = max((b.last - b.first for task in tasks for b in task), default=0)
        self.scratch = [Scratch(self.i.x, largest, self.steps.view) for _ in range(self.num_workers)]

    def run_tasks(self) -> None:
        def run(number: int, worker: int) -> None:
            for block in self.tasks[number]:
                self.run_block(block, worker)

        self.steps.for_each(len(self.tasks), self.num_workers, run)

    def project_up(self, block: Block, rows: Tensor, z: Tensor) -> None:
        self.multiply(z, rows, self.gate_up[block.expert].mT, self.gate_up_bias[block.expert])

    def add_in_order(self, block: Block, scratch: Scratch, rows, weighted: bool, total) -> None:
        """Add the rows of scratch's buffer "rows" to their tokens, after those of all blocks before."""
        give_back, choices = scratch.lend("rows"), self.order[block.first : block.last]

        def add() -> None:
            self.steps.accumulate(rows, choices, weighted, total)
            give_back()

        self.in_order.add(block.number, add)


def per_expert(bias: Tensor | None, x: Tensor, num_experts: int) -> tuple:
    return (None,) * num_experts if bias is None else bias.to(x.dtype).unbind(0)


class ForwardLoop(Loop):
    def __init__(self, steps_class: type, outs: tuple[Tensor, Tensor], i: ExpertInputs):
        super().__init__(steps_class, i)
        self.out, self.z = outs
        self.weighted = not rows_alone.get()  # of this thread
        self.z_view = self.steps.view(self.z)
        self.total = self.out
        if self.out.dtype != self.sums:
            self.total = self.out.new_empty(self.out.shape, dtype=self.sums)
        self.steps.prepare(self.out, self.z, self.total)
        self.total_view = self.steps.view(self.total.zero_())
        self.set_tasks([[block] for expert in self.experts for block in expert])

    def run(self) -> None:
        self.run_tasks()
        self.z[self.tasks[-1][-1].z_last if self.tasks else 0 :].zero_()
        if self.total is not self.out:
            self.out.copy_(self.total)

    def run_block(self, block: Block, worker: int) -> None:
        scratch, steps, n = self.scratch[worker], self.steps, block.last - block.first
        rows, rows_view = scratch.take("rows", n, self.hidden)
        a, a_view = scratch.take("a", n, self.channels)
        if self.i.save_z:
            rows_of_z = slice(block.z_first, block.z_last)
            z, z_view = self.z[rows_of_z], self.z_view[rows_of_z]
        else:
            z, z_view = scratch.take("z", n, self.width)
        steps.gather(self.x, self.order[block.first : block.last], rows_view)
        self.project_up(block, rows, z)
        steps.glu(z_view[:n], a_view, self.upcoming(block))
        self.multiply(rows, a, self.down[block.expert].mT, self.down_bias[block.expert])
        self.add_in_order(block, scratch, rows_view, self.weighted, self.total_view)

    def upcoming(self, block: Block) -> list[Tensor]:
        """The weights that this worker multiplies with next, as far as it is known."""
        following = self.tasks[block.number + self.num_workers :][:1]
        return [self.down[block.expert], *(self.gate_up[task[0].expert] for task in following)]


class BackwardLoop(Loop):
    def __init__(self, steps_class: type, grads: tuple, i: LoopBackwardInputs):
        super().__init__(steps_class, i)
        self.grads, self.needs, dout = LoopGrads(*grads), LoopGrads(*i.needs), i.dout
        view = self.steps.view
        self.dout, self.z = view(dout.contiguous()), view(i.z)
        self.steps.prepare(self.grads.gate_up, self.grads.down)
        self.totals = {
            name: dout.new_zeros(getattr(self.grads, name).shape, dtype=self.sums)
            for name in ("x", "gate_up_bias", "down_bias", "routing_weights")
        }
        self.multiply_wide = chosen(*[self.totals["routing_weights"]] * 2, None)
        self.views = {name: view(total) for name, total in self.totals.items()}
        self.dweights = view(self.totals["routing_weights"].view(-1))
        # a task is a whole expert, so that its weight gradients have one worker
        self.set_tasks([expert for expert in self.experts if expert])
        names = [name for name in ("gate_up", "down") if getattr(self.needs, name)]
        self.products = {name: self.weight_gradients(name) for name in names}

    def weight_gradients(self, name: str) -> list[WeightGradient]:
        """Return a gradient for each worker; experts without rows get zeros."""
        main_grad = getattr(self.i, f"{name}_main_grad")
        grads = (getattr(self.grads, name) if main_grad is None else main_grad).unbind(0)
        for grad, expert in zip(grads, self.experts, strict=True):
            if main_grad is None and not expert:
                grad.zero_()
        return [WeightGradient(grads, main_grad is not None) for _ in range(self.num_workers)]

    def run(self) -> None:
        self.run_tasks()
        for name, total in self.totals.items():
            getattr(self.grads, name).copy_(total)

    def run_block(self, block: Block, worker: int) -> None:
        _, expert, first, last, *_ = block
        needs, steps, scratch, n = self.needs, self.steps, self.scratch[worker], last - first
        choices = self.order[first:last]
        dy, dy_view = scratch.take("rows", n, self.hidden)
        steps.gather(self.dout, choices, dy_view)
        if needs.down_bias:
            steps.column_sum(dy_view, choices, True, self.views["down_bias"][expert])

        x, z = self.inputs_of(block, scratch, choices)
        da, da_view = scratch.take("da", n, self.channels)
        a, a_view = scratch.take("a", n, self.channels)
        dz, dz_view = scratch.take("dz", n, self.width)
        self.multiply(da, dy, self.down[expert], None)
        steps.glu_backward(da_view, z, choices, (dz_view, a_view, self.dweights))
        if self.down_bias[expert] is not None:
            dots = self.totals["routing_weights"].new_empty(n, 1)
            self.multiply_wide(dots, wide(dy[:n]), wide(self.down_bias[expert])[:, None], None)
            self.totals["routing_weights"].view(-1)[self.i.order[first:last]] += dots[:, 0]

        if needs.down:
            self.products["down"][worker].add(block, dy, a)
        if needs.gate_up:
            self.products["gate_up"][worker].add(block, dz, x)
        if needs.gate_up_bias:
            steps.column_sum(dz_view, choices, False, self.views["gate_up_bias"][expert])
        if needs.x:
            self.multiply(dy, dz, self.gate_up[expert], None)
            self.add_in_order(block, scratch, dy_view, False, self.views["x"])

    def inputs_of(self, block: Block, scratch: Scratch, choices) -> tuple:
        """The rows of x, if a product needs them, and of z, saved or computed again, as the steps see it."""
        n, x = block.last - block.first, None
        if self.needs.gate_up or not len(self.z):
            x, x_view = scratch.take("x", n, self.hidden)
            self.steps.gather(self.x, choices, x_view)
        if len(self.z):
            return x, self.z[block.z_first : block.z_first + n]
        z, z_view = scratch.take("z", n, self.width)
        self.project_up(block, x, z)
        return x, z_view


def launcher(loop: type, steps_class: type) -> Callable:
    return lambda out, i: loop(steps_class, out, i).run()


def new_expert_loop(i: LoopInputs) -> tuple[Tensor, Tensor]:
    check_experts(i)
    check_built(i.x)
    rows = num_z_rows(i.order.shape[0], i.down.shape[0], i.x.dtype) if i.save_z else 0
    return i.x.new_empty(i.x.shape), i.x.new_empty(rows, i.gate_up.shape[1])


def new_expert_loop_backward(i: LoopBackwardInputs) -> tuple[Tensor, ...]:
    needs = LoopGrads(*i.needs)
    check_float(x=i.x, dout=i.dout, z=i.z)
    if i.dout.shape != i.x.shape:
        raise ValueError(f"dout is {tuple(i.dout.shape)} but x is {tuple(i.x.shape)}")
    onto_main = {"gate_up": i.gate_up_main_grad is not None, "down": i.down_main_grad is not None}

    def new(name: str, needed: bool) -> Tensor:
        return (
            torch.empty_like(getattr(i, name)) if needed and not onto_main.get(name) else i.dout.new_empty(0)
        )

    grads = LoopGrads(*(new(name, needed) for name, needed in needs._asdict().items()))
    # always there, so the op has an output even where every gradient goes onto a main gradient
    return grads._replace(routing_weights=i.routing_weights.new_empty(i.rank.shape))


# op
def save_expert_loop(ctx, i: LoopInputs, output):
    # a main gradient is not saved: another backward pass may change it first
    tensors, ctx.others, ctx.x_shape = i[1:9], i[9:], i.x.shape
    needs_x = ctx.needs_input_grad[1] or not i.save_z
    ctx.save_for_backward(output[1], i.x if needs_x else None, *tensors)
    ctx.set_materialize_grads(False)


def backward_expert_loop(ctx, dout, dz):
    if dout is None:
        return gradients(LoopInputs)
    z, x, *tensors = saved_tensors(ctx)
    tensors = [dout if x is None else x, *tensors]  # dout has the shape and dtype of an x that is not read
    needed = LoopInputs(*ctx.needs_input_grad)
    needs = [getattr(needed, name) for name in LoopGrads._fields]
    grads = expert_loop_backward_op(dout, z, *tensors, *ctx.others, needs)
    onto_main = {"gate_up": ctx.others[-2] is not None, "down": ctx.others[-1] is not None}
    named = zip(LoopGrads._fields, grads, needs, strict=True)
    returned = {name: grad for name, grad, need in named if need and not onto_main.get(name)}
    return gradients(LoopInputs, **returned)


expert_loop_op = define_op(
    "expert_loop", LoopInputs, outputs=2, new=new_expert_loop, check_values=check_expert_values,
    reference=expert_loop_reference, torch=launcher(ForwardLoop, TorchSteps),
    host=host(takes(*HOST_DTYPES)(launcher(ForwardLoop, HostSteps))), save=save_expert_loop,
    backward=backward_expert_loop,
)  # fmt: skip
expert_loop_backward_op = define_op(
    "expert_loop_backward", LoopBackwardInputs, outputs=6, new=new_expert_loop_backward,
    torch=launcher(BackwardLoop, TorchSteps),
    host=host(takes(*HOST_DTYPES)(launcher(BackwardLoop, HostSteps))),
)  # fmt: skip
