// What a decision costs the device by each way that CUDA has to go on without the host, beside the
// same kernels in a row:
//
//     nvcc -O3 -arch=native -rdc=true -o device_launch benchmarks/kernels/device_launch.cu -lcudadevrt
//     ./device_launch
//
// Eight pieces of four kernels of one element; a kernel behind each piece but the last decides, and
// always for going on. `nested conditionals` puts the next piece into the body of an IF node, as
// `narrowgauge_lab.anytime` does; `fire and forget` and `tail launch` have the deciding kernel
// launch the graph of the next piece. The row has that kernel too, and decides nothing. Every way
// is checked to run all of its kernels once.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                   \
    do {                                                                              \
        const cudaError_t code = (call);                                              \
        if (code != cudaSuccess) {                                                    \
            std::printf("%s: %s\n", #call, cudaGetErrorString(code));                 \
            std::exit(1);                                                             \
        }                                                                             \
    } while (0)

namespace {

constexpr int kKernels = 4, kDecisions = 7, kWarmUps = 50, kLaunches = 400, kRounds = 3;

__global__ void add_one(float* count) { *count += 1.0f; }

__global__ void decide_nothing(const float* count, float* onward) { *onward = *count > -1.0f; }

__global__ void set_condition(cudaGraphConditionalHandle handle, const float* count)
{
    cudaGraphSetConditional(handle, *count > -1.0f);
}

template <bool tail>
__global__ void launch_next(const cudaGraphExec_t* next, const float* count, float* onward)
{
    *onward = *count > -1.0f;
    if (*onward != 0.0f) {
        __threadfence();  // what the next piece reads
        cudaGraphLaunch(*next, tail ? cudaStreamGraphTailLaunch : cudaStreamGraphFireAndForget);
    }
}

struct Memory {
    float *count, *onward;
    cudaGraphExec_t* next;  // for each decision, the graph that it launches
};

cudaGraphNode_t add(cudaGraph_t graph, cudaGraphNode_t after, const void* kernel, void** arguments)
{
    cudaKernelNodeParams parameters = {};
    parameters.func = const_cast<void*>(kernel);
    parameters.gridDim = parameters.blockDim = dim3(1);
    parameters.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, after ? &after : nullptr, after ? 1 : 0, &parameters));
    return node;
}

cudaGraphNode_t add_piece(cudaGraph_t graph, cudaGraphNode_t after, Memory& memory)
{
    void* arguments[] = {&memory.count};
    for (int i = 0; i < kKernels; ++i) {
        after = add(graph, after, reinterpret_cast<const void*>(add_one), arguments);
    }
    return after;
}

cudaGraphExec_t in_a_row(Memory& memory, unsigned flags, cudaStream_t stream)
{
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    void* arguments[] = {&memory.count, &memory.onward};
    cudaGraphNode_t last = add_piece(graph, nullptr, memory);
    for (int i = 0; i < kDecisions; ++i) {
        last = add(graph, last, reinterpret_cast<const void*>(decide_nothing), arguments);
        last = add_piece(graph, last, memory);
    }
    cudaGraphExec_t made;
    CHECK(cudaGraphInstantiate(&made, graph, flags));
    if (flags) {
        CHECK(cudaGraphUpload(made, stream));
    }
    return made;
}

cudaGraphExec_t nested(Memory& memory)
{
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraph_t body = graph;
    cudaGraphNode_t last = add_piece(body, nullptr, memory);
    for (int i = 0; i < kDecisions; ++i) {
        cudaGraphConditionalHandle handle;
        CHECK(cudaGraphConditionalHandleCreate(&handle, graph, 0, 0));
        void* arguments[] = {&handle, &memory.count};
        last = add(body, last, reinterpret_cast<const void*>(set_condition), arguments);
        cudaGraphNodeParams parameters = {};
        parameters.type = cudaGraphNodeTypeConditional;
        parameters.conditional.handle = handle;
        parameters.conditional.type = cudaGraphCondTypeIf;
        parameters.conditional.size = 1;
        cudaGraphNode_t node;
        CHECK(cudaGraphAddNode(&node, body, &last, nullptr, 1, &parameters));
        body = parameters.conditional.phGraph_out[0];
        last = add_piece(body, nullptr, memory);
    }
    cudaGraphExec_t made;
    CHECK(cudaGraphInstantiate(&made, graph, 0));
    return made;
}

// A graph for each piece; the first one, which the host launches.
cudaGraphExec_t by_launches(Memory& memory, bool tail, cudaStream_t stream)
{
    const void* kernel = tail ? reinterpret_cast<const void*>(launch_next<true>)
                              : reinterpret_cast<const void*>(launch_next<false>);
    std::vector<cudaGraphExec_t> made(kDecisions + 1);
    for (int i = 0; i <= kDecisions; ++i) {
        cudaGraph_t graph;
        CHECK(cudaGraphCreate(&graph, 0));
        const cudaGraphNode_t last = add_piece(graph, nullptr, memory);
        cudaGraphExec_t* next = memory.next + i;
        void* arguments[] = {&next, &memory.count, &memory.onward};
        if (i < kDecisions) {
            add(graph, last, kernel, arguments);
        }
        CHECK(cudaGraphInstantiate(&made[i], graph, cudaGraphInstantiateFlagDeviceLaunch));
        CHECK(cudaGraphUpload(made[i], stream));
    }
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(
        memory.next, made.data() + 1, kDecisions * sizeof(made[0]), cudaMemcpyHostToDevice));
    return made[0];
}

// Microseconds from before the launch to the end of all that it brought, in the median.
float timed(cudaStream_t stream, cudaGraphExec_t graph, int launches)
{
    cudaEvent_t before, behind;
    CHECK(cudaEventCreate(&before));
    CHECK(cudaEventCreate(&behind));
    std::vector<float> taken;
    for (int i = 0; i < launches; ++i) {
        CHECK(cudaEventRecord(before, stream));
        CHECK(cudaGraphLaunch(graph, stream));
        CHECK(cudaEventRecord(behind, stream));
        CHECK(cudaEventSynchronize(behind));
        float milliseconds;
        CHECK(cudaEventElapsedTime(&milliseconds, before, behind));
        taken.push_back(milliseconds * 1e3f);
    }
    std::sort(taken.begin(), taken.end());
    return taken[taken.size() / 2];
}

void require_all_ran(const char* name, cudaStream_t stream, cudaGraphExec_t graph, float* count)
{
    CHECK(cudaMemset(count, 0, sizeof(float)));
    CHECK(cudaGraphLaunch(graph, stream));
    CHECK(cudaStreamSynchronize(stream));
    float ran;
    CHECK(cudaMemcpy(&ran, count, sizeof ran, cudaMemcpyDeviceToHost));
    if (ran != kKernels * (kDecisions + 1)) {
        std::printf("%s ran %g kernels of %d\n", name, ran, kKernels * (kDecisions + 1));
        std::exit(1);
    }
}

Memory allocated()
{
    Memory memory;
    CHECK(cudaMalloc(&memory.count, sizeof(float)));
    CHECK(cudaMalloc(&memory.onward, sizeof(float)));
    CHECK(cudaMalloc(&memory.next, kDecisions * sizeof(cudaGraphExec_t)));
    return memory;
}

}  // namespace

int main()
{
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    // Of two ways of launches, each has cells of its own.
    Memory memory = allocated(), other = allocated();
    struct {
        const char* name;
        cudaGraphExec_t graph;
        float* count;
    } const ways[] = {
        {"in a row", in_a_row(memory, 0, stream), memory.count},
        {"in a row, launchable", in_a_row(memory, cudaGraphInstantiateFlagDeviceLaunch, stream),
         memory.count},
        {"nested conditionals", nested(memory), memory.count},
        {"fire and forget", by_launches(memory, false, stream), memory.count},
        {"tail launch", by_launches(other, true, stream), other.count},
    };
    for (const auto& way : ways) {
        require_all_ran(way.name, stream, way.graph, way.count);
        timed(stream, way.graph, kWarmUps);
    }
    std::printf("%-22s %10s %16s\n", "way", "all, us", "a decision, us");
    for (int round = 0; round < kRounds; ++round) {
        const float row = timed(stream, ways[0].graph, kLaunches);
        for (const auto& way : ways) {
            const float all = timed(stream, way.graph, kLaunches);
            std::printf("%-22s %10.2f %16.2f\n", way.name, all, (all - row) / kDecisions);
        }
    }
    return 0;
}
