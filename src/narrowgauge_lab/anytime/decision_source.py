"""CUDA code of what follows a stage: is each sample sure, what does it leave, who goes on.

`decide` leaves samples where they are, `pack` moves those who go on to the front. Both do what
torch's operators do in their order of rounding (policies.py), but for the order of sums. Where
there are conditional graph nodes they set the condition of the one behind their stage, if its
handle is in the cell that they are given.
"""

from __future__ import annotations

from narrowgauge_lab.anytime.conditional import DECLARED

__all__ = [
    "DECIDE", "DECIDE_THREADS", "KINDS", "MOST_SAMPLES", "MOST_SIZES", "PACK", "SOURCE",
    "SOURCE_WITH_CONDITIONS",
]  # fmt: skip

DECIDE, PACK = "decide", "pack"
#: Threads of a block of `decide`; several blocks where a batch has more samples than they hold.
DECIDE_THREADS = 128
#: `pack` is one block with a thread for each sample.
MOST_SAMPLES = 1024
#: Of a ladder that `pack` chooses from: a lane of a warp looks at each.
MOST_SIZES = 32
#: What policies call their measures, by the number that the kernels know them by.
KINDS = ("entropy", "max-probability", "margin")

_BODY = """\
#define EVERYBODY 0xffffffffu

enum Kind { kEntropy, kMaxProbability, kMargin };

// By which measure: below `limit` by entropy, times `scale`; else from `limit` on.
struct Rule {
    unsigned int kind;
    float limit;
    float scale;
};

static __device__ bool is_number(float x)
{
    return fabsf(x) <= 3.402823466e+38f;
}

static __device__ float sum_of(float value, unsigned int lanes)
{
    for (unsigned int other = lanes / 2; other > 0; other /= 2) {
        value += __shfl_xor_sync(EVERYBODY, value, other);
    }
    return value;
}

// Of the softmax, by `lanes` neighbours of a warp, a power of two, which all get the same.
static __device__ float measured(
    const float* row, unsigned int classes, unsigned int lane, unsigned int lanes, Rule rule,
    float largest)
{
    float sum = 0.0f, first = 0.0f, second = 0.0f;
    for (unsigned int i = lane; i < classes; i += lanes) {
        const float share = expf(row[i] - largest);
        sum += share;
        second = fmaxf(second, fminf(first, share));
        first = fmaxf(first, share);
    }
    sum = sum_of(sum, lanes);
    if (rule.kind == kEntropy) {
        const float logarithm = logf(sum);
        float terms = 0.0f;
        for (unsigned int i = lane; i < classes; i += lanes) {
            const float log_share = row[i] - largest - logarithm;
            const float share = expf(log_share);
            // Rounded before it is added, as by operators of their own.
            terms += share == 0.0f ? 0.0f : __fmul_rn(share, log_share);
        }
        return -sum_of(terms, lanes) * rule.scale;
    }
    for (unsigned int other = lanes / 2; other > 0; other /= 2) {
        const float their_first = __shfl_xor_sync(EVERYBODY, first, other);
        const float their_second = __shfl_xor_sync(EVERYBODY, second, other);
        second = fmaxf(fminf(first, their_first), fmaxf(second, their_second));
        first = fmaxf(first, their_first);
    }
    return rule.kind == kMargin ? first / sum - second / sum : first / sum;
}

// Whether the sample leaves. All lanes of the warp have to come here; no classes for no sample.
static __device__ bool is_sure(
    const float* row, unsigned int classes, unsigned int lane, unsigned int lanes, Rule rule)
{
    float largest = -3.402823466e+38f;
    int numbers = 1;
    for (unsigned int i = lane; i < classes; i += lanes) {
        numbers &= is_number(row[i]) ? 1 : 0;
        largest = fmaxf(largest, row[i]);
    }
    for (unsigned int other = lanes / 2; other > 0; other /= 2) {
        numbers &= __shfl_xor_sync(EVERYBODY, numbers, other);
        largest = fmaxf(largest, __shfl_xor_sync(EVERYBODY, largest, other));
    }
    const float value = measured(row, classes, lane, lanes, rule, largest);
    const bool sure = rule.kind == kEntropy ? value < rule.limit : value >= rule.limit;
    return numbers != 0 && sure;
}

static __device__ double cost_of(
    const double* each, unsigned int sample, unsigned int low, unsigned int high)
{
    return each != nullptr ? each[sample] : __hiloint2double((int)high, (int)low);
}

// cell: of the handle of a condition, 0 for none; or null. Read early, as it is needed at the end.
static __device__ unsigned long long handle_in(const unsigned long long* cell)
{
    return cell == nullptr ? 0 : *cell;
}

static __device__ void set_condition(unsigned long long handle, unsigned int value)
{
    if (handle != 0) {
        SET_CONDITION(handle, value);
    }
}

// logits and kept: [batch, classes]. each: MACs of every sample, or null and one number for all.
// turn: 0 before and after; blocks count themselves in its low half, those with somebody who goes
// on in its high half. The condition of `cell` is whether anybody goes on, as the flag.
extern "C" __global__ void __launch_bounds__(128) decide(
    const float* logits, float* kept, long long* exits, double* macs, bool* undecided, bool* flag,
    unsigned int* turn, const double* each, const unsigned long long* cell, unsigned int batch,
    unsigned int classes, unsigned int lanes, unsigned int kind, unsigned int limit,
    unsigned int scale, unsigned int macs_low, unsigned int macs_high, unsigned int stage,
    unsigned int last)
{
    const unsigned long long condition = handle_in(cell);
    const Rule rule = {kind, __uint_as_float(limit), __uint_as_float(scale)};
    const unsigned int lane = threadIdx.x % lanes;
    const unsigned int sample = (blockIdx.x * blockDim.x + threadIdx.x) / lanes;
    const bool there = sample < batch;
    const size_t start = (size_t)(there ? sample : 0) * classes;
    const bool here = there && (stage == 0 || undecided[sample]);
    const bool leaves = !last && is_sure(logits + start, there ? classes : 0, lane, lanes, rule);
    for (unsigned int i = lane; here && i < classes; i += lanes) {
        kept[start + i] = logits[start + i];
    }
    __syncwarp();  // all lanes know `here` before one writes over it
    bool onward = false;
    if (there && lane == 0) {
        const double before = stage == 0 ? 0.0 : macs[sample];
        macs[sample] = before + (here ? cost_of(each, sample, macs_low, macs_high) : 0.0);
        if (here) {
            exits[sample] = stage;
        }
        onward = here && !leaves;
        undecided[sample] = onward;
    }
    const bool any = __syncthreads_or(onward) != 0;
    if (last || threadIdx.x != 0) {
        return;
    }
    if (gridDim.x == 1) {
        *flag = any;
        set_condition(condition, any);
        return;
    }
    const unsigned int before = atomicAdd(turn, any ? 0x10001u : 1u);
    if ((before & 0xffffu) == gridDim.x - 1) {
        *flag = any || before > 0xffffu;
        *turn = 0;
        set_condition(condition, any || before > 0xffffu);
    }
}

// One block, of `size` threads at least. Row r is sample rest[r]; `batch` there is nobody.
// place: where in front each row goes, `batch` if nowhere; next_rest [batch + 1]: who then stands
// where; count: how many. The condition of `cell` is the place of the first of `steps` ascending
// sizes that holds them all, or `steps` where nobody goes on.
extern "C" __global__ void __launch_bounds__(1024) pack(
    const float* logits, float* kept, long long* exits, double* macs, const double* each,
    const long long* rest, long long* next_rest, long long* place, long long* count,
    const long long* sizes, const unsigned long long* cell, unsigned int size, unsigned int batch,
    unsigned int classes, unsigned int lanes,
    unsigned int kind, unsigned int limit, unsigned int scale, unsigned int macs_low,
    unsigned int macs_high, unsigned int stage, unsigned int last, unsigned int steps)
{
    __shared__ bool goes_on[1024];
    __shared__ unsigned int found[32];
    const unsigned long long condition = handle_in(cell);
    const Rule rule = {kind, __uint_as_float(limit), __uint_as_float(scale)};
    const unsigned int thread = threadIdx.x, lane = thread % lanes, groups = blockDim.x / lanes;
    for (unsigned int base = 0; base < size; base += groups) {
        const unsigned int row = base + thread / lanes;
        const bool there = row < size;
        const long long sample = there ? rest[row] : batch;
        const float* given = logits + (size_t)(there ? row : 0) * classes;
        const bool leaves = !last && is_sure(given, there ? classes : 0, lane, lanes, rule);
        const bool here = sample < batch;
        for (unsigned int i = lane; here && i < classes; i += lanes) {
            kept[(size_t)sample * classes + i] = given[i];
        }
        if (there && lane == 0) {
            goes_on[row] = here && !leaves;
        }
        if (here && lane == 0) {
            exits[sample] = stage;
            macs[sample] += cost_of(each, row, macs_low, macs_high);
        }
    }
    if (last) {
        return;
    }
    __syncthreads();
    const bool onward = thread < size && goes_on[thread];
    const unsigned int votes = __ballot_sync(EVERYBODY, onward);
    if (thread % 32 == 0) {
        found[thread / 32] = __popc(votes);
    }
    __syncthreads();
    unsigned int before = __popc(votes & ((1u << thread % 32) - 1)), total = 0;
    for (unsigned int warp = 0; warp < blockDim.x / 32; ++warp) {
        before += warp < thread / 32 ? found[warp] : 0;
        total += found[warp];
    }
    if (thread < size) {
        place[thread] = onward ? before : batch;
    }
    if (onward) {
        next_rest[before] = rest[thread];
    }
    for (unsigned int i = total + thread; i <= batch; i += blockDim.x) {
        next_rest[i] = batch;
    }
    const bool small = thread < steps && (unsigned long long)sizes[thread] < total;
    const unsigned int smaller = __popc(__ballot_sync(EVERYBODY, small));
    if (thread == 0) {
        *count = total;
        set_condition(condition, total != 0 ? smaller : steps);
    }
}
"""

SOURCE = f"""\
#define SET_CONDITION(handle, value) ((void)(handle), (void)(value))
{_BODY}"""
#: For GPUs with conditional nodes: the driver resolves the name.
SOURCE_WITH_CONDITIONS = f"""\
{DECLARED}#define SET_CONDITION(handle, value) cudaGraphSetConditional(handle, value)
{_BODY}"""
