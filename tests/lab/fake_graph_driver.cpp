// The part of libcuda that graphs of conditional nodes need, with graphs that really run here: a
// child is a number that is noted, and after which the next scripted flag is written, or the
// condition set whose handle is in the next cell.
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// As cuda.h has them.
struct ConditionalParams {
    int type;
    int reserved0[3];
    union {
        long long reserved1[29];
        struct {
            unsigned long long handle;
            int kind;
            unsigned int size;
            void** bodies;
            void* context;
        } conditional;
    };
    long long reserved2;
};
static_assert(sizeof(ConditionalParams) == 256, "CUgraphNodeParams");

struct KernelParams {
    void* function;
    unsigned int grid[3], block[3], shared_bytes;
    void** parameters;
    void** extra;
};
static_assert(sizeof(KernelParams) == 56, "CUDA_KERNEL_NODE_PARAMS_v1");

struct Graph;
struct Node {
    enum Kind { child, kernel, branch } kind;
    uintptr_t piece = 0;
    unsigned long long handle = 0;
    const bool* flag = nullptr;
    int type = 0;
    std::vector<void*> bodies;
};
struct Graph {
    std::vector<Node*> nodes;
};
struct Condition {
    unsigned int value = 0, at_first = 0;
    bool has_first = false;
};

int context, function_handle, refused, version = 12040;
std::vector<Condition> conditions;
std::vector<uintptr_t> ran;
std::vector<bool> script;
size_t scripted;
bool* written;
const long long* cells;
std::vector<unsigned int> values;
int alive;

// Each node comes after the one before it, and the first after nothing.
bool misplaced(Graph* graph, void* const* after, size_t count)
{
    if (graph->nodes.empty()) return count != 0;
    return count != 1 || after[0] != graph->nodes.back();
}

void run(Graph* graph)
{
    for (Node* node : graph->nodes) {
        if (node->kind == Node::child) {
            ran.push_back(node->piece);
            if (scripted < script.size()) {
                *written = script[scripted++];
            } else if (scripted < values.size()) {
                conditions[cells[scripted]].value = values[scripted];
                ++scripted;
            }
        } else if (node->kind == Node::kernel) {
            conditions[node->handle].value = *node->flag;
        } else {
            const unsigned int value = conditions[node->handle].value;
            const size_t place = node->type == 2 ? value : value != 0 ? 0 : node->bodies.size();
            if (place < node->bodies.size()) run(static_cast<Graph*>(node->bodies[place]));
        }
    }
}

}  // namespace

extern "C" {

void fake_refuse(int call) { refused = call; }
void fake_version(int given) { version = given; }
void fake_script(bool* flag, const bool* flags, int count)
{
    written = flag;
    script.assign(flags, flags + count);
    values.clear();
    scripted = 0;
    ran.clear();
}
void fake_set(const long long* given, const unsigned int* to, int count)
{
    cells = given;
    values.assign(to, to + count);
    script.clear();
    scripted = 0;
    ran.clear();
}
int fake_ran(uintptr_t* pieces)
{
    std::memcpy(pieces, ran.data(), ran.size() * sizeof(uintptr_t));
    return static_cast<int>(ran.size());
}
int fake_alive() { return alive; }

int cuDriverGetVersion(int* given) { *given = version; return 0; }
int cuCtxGetCurrent(void** current) { *current = &context; return 0; }
int cuGetErrorString(int, const char** text) { *text = "refused for a test"; return 0; }
int cuModuleLoadData(void** module, const void*) { *module = &function_handle; return 0; }
int cuModuleGetFunction(void** function, void*, const char* name)
{
    *function = &function_handle;
    return std::strcmp(name, "go_on") == 0 ? 0 : 500;
}
int cuGraphCreate(void** graph, unsigned int flags)
{
    if (refused == 1 || flags != 0) return 1;
    *graph = new Graph;
    ++alive;
    return 0;
}
int cuGraphAddChildGraphNode(
    void** node, void* graph, void* const* after, size_t count, void* child)
{
    Graph* whole = static_cast<Graph*>(graph);
    if (misplaced(whole, after, count)) return 1;
    Node* made = new Node{Node::child};
    made->piece = reinterpret_cast<uintptr_t>(child);
    whole->nodes.push_back(made);
    *node = made;
    return 0;
}
int cuGraphConditionalHandleCreate(
    unsigned long long* handle, void* graph, void* given, unsigned int initial, unsigned int flags)
{
    if (graph == nullptr || given != &context || flags > 1 || (initial != 0 && flags == 0)) return 1;
    if (conditions.empty()) conditions.emplace_back();  // no handle is 0
    *handle = conditions.size();
    conditions.emplace_back();
    conditions.back().at_first = initial;
    conditions.back().has_first = flags == 1;
    return 0;
}
int cuGraphAddKernelNode(
    void** node, void* graph, void* const* after, size_t count, const KernelParams* given)
{
    Graph* whole = static_cast<Graph*>(graph);
    if (misplaced(whole, after, count) || given->function != &function_handle) return 1;
    for (int axis = 0; axis < 3; ++axis) {
        if (given->grid[axis] != 1 || given->block[axis] != 1) return 1;
    }
    if (given->shared_bytes != 0 || given->extra != nullptr) return 1;
    Node* made = new Node{Node::kernel};
    made->handle = *static_cast<unsigned long long*>(given->parameters[0]);
    made->flag = *static_cast<const bool**>(given->parameters[1]);
    whole->nodes.push_back(made);
    *node = made;
    return 0;
}
int cuGraphAddNode(
    void** node, void* graph, void* const* after, size_t count, ConditionalParams* given)
{
    Graph* whole = static_cast<Graph*>(graph);
    if (misplaced(whole, after, count) || given->type != 13 || given->reserved2 != 0) return 1;
    const int kind = given->conditional.kind;
    const unsigned int size = given->conditional.size;
    if (!(kind == 0 && size == 1) && !(kind == 2 && size > 0 && version >= 12080)) return 1;
    if (given->conditional.context != &context) return 1;
    Node* made = new Node{Node::branch};
    made->handle = given->conditional.handle;
    made->type = kind;
    for (unsigned int place = 0; place < size; ++place) made->bodies.push_back(new Graph);
    given->conditional.bodies = made->bodies.data();
    whole->nodes.push_back(made);
    *node = made;
    return 0;
}
int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long flags)
{
    if (refused == 2 || flags != 0) return 801;
    *executable = graph;
    return 0;
}
int cuGraphLaunch(void* executable, void*)
{
    for (Condition& each : conditions) {
        if (each.has_first) each.value = each.at_first;
    }
    run(static_cast<Graph*>(executable));
    return 0;
}
int cuGraphExecDestroy(void*) { return 0; }
int cuGraphDestroy(void*) { --alive; return 0; }

}  // extern "C"
