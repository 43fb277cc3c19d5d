// The engine of shim.h: runs the threads of a block as fibers.
//
// The Engine owns the stacks of the fibers, and runs one kernel at a time. A fiber takes the next thread of the block that
// has not started, runs the kernel for it, and takes another. When its thread must wait, it switches to a fiber that can
// continue, or to a new one that starts the next thread. So a kernel that never waits needs one fiber and no switches. If no
// fiber can continue while threads still wait, the kernel has a barrier that not all threads reach, which is reported.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <ucontext.h>
#include <vector>

#include "shim.h"
#include "shim_copies.h"
#include "shim_groups.h"

ShimNow shim_now;

namespace shim {
namespace {

// ---- Switching stacks ----

#if defined(__x86_64__)
// Saves the callee-saved registers on the current stack and restores them from the other one.
extern "C" void shim_switch(void** left, void* entered);
asm(R"(
.text
.hidden shim_switch
.globl shim_switch
.type shim_switch, @function
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size shim_switch, .-shim_switch
)");

struct Context {
    void* stack_pointer = nullptr;

    void prepare(unsigned char* top, void (*entry)()) {
        // At the first instruction of a function the stack pointer is 8 off a multiple of 16, because of the return
        // address.
        auto** words = (void**)((uintptr_t)top & ~(uintptr_t)15);
        *--words = nullptr;
        *--words = (void*)entry;
        words -= 6;
        memset(words, 0, 6 * sizeof *words);
        stack_pointer = words;
    }
    void enter(Context& other) { shim_switch(&stack_pointer, other.stack_pointer); }
};
#else
struct Context {
    ucontext_t context;

    void prepare(unsigned char* top, void (*entry)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = top - 60 * 1024;
        context.uc_stack.ss_size = 60 * 1024;
        context.uc_link = nullptr;
        makecontext(&context, entry, 0);
    }
    void enter(Context& other) { swapcontext(&context, &other.context); }
};
#endif

constexpr size_t STACK = 192 * 1024;
constexpr uint64_t CANARY = 0x5a17'57ac'ed0f'f1be;
constexpr unsigned WARP = 32;
constexpr unsigned MOST_THREADS = 1024;
constexpr size_t MOST_SHARED = 227 * 1024;

enum class State : unsigned char { Unstarted, Running, AtBarrier, InWarpCall, Done };

struct Fiber {
    Context context;
    unsigned char* stack;
    unsigned thread;   // the thread that it runs
};

enum class Order { Forward, Reverse, Shuffled };

Order order_asked_for() {
    const char* text = getenv("FAKE_GPU_ORDER");
    if (text == nullptr || *text == 0 || strcmp(text, "forward") == 0) return Order::Forward;
    if (strcmp(text, "reverse") == 0) return Order::Reverse;
    if (strcmp(text, "shuffled") == 0) return Order::Shuffled;
    fprintf(stderr, "FAKE GPU: FAKE_GPU_ORDER=%s, expected forward, reverse or shuffled\n", text);
    abort();
}

uint64_t seed_asked_for() {
    const char* text = getenv("FAKE_GPU_SEED");
    return (text == nullptr ? 1 : strtoull(text, nullptr, 10)) * 0x9e3779b97f4a7c15 | 1;
}

std::string kernel_made_wrong() {
    const char* text = getenv("FAKE_GPU_LAME");
    return text == nullptr ? "" : text;
}

// FAKE_GPU_SLOW=MS makes each launch of our own convolutions of several channels take so many milliseconds longer, for tests of
// what is fastest: they must not depend on what else the machine does.
void delay_convolution(const char* name) {
    static const char* const text = getenv("FAKE_GPU_SLOW");
    const auto begins = [name](const char* prefix) { return strncmp(name, prefix, strlen(prefix)) == 0; };
    if (text == nullptr || !(begins("conv_forward") || begins("conv_backward") || begins("conv_direct"))) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(atoi(text)));
}

void fiber_main();

class Engine {
  public:
    void run(const Kernel& new_kernel, dim3 blocks, dim3 threads, unsigned shared, void** new_arguments) {
        delay_convolution(new_kernel.name);
        // Host threads have streams of their own. A kernel waits for none of another stream.
        std::lock_guard lock(running);
        kernel = &new_kernel;
        arguments = new_arguments;
        shim_now.blocks = {blocks.x, blocks.y, blocks.z};
        shim_now.threads = {threads.x, threads.y, threads.z};
        count = threads.x * threads.y * threads.z;
        if (count == 0 || count > MOST_THREADS || shared > MOST_SHARED) fail("invalid launch configuration");
        dynamic.resize(MOST_SHARED + 16);
        shim_now.dynamic = (unsigned char*)(((uintptr_t)dynamic.data() + 15) & ~(uintptr_t)15);
        const uint64_t all = (uint64_t)blocks.x * blocks.y * blocks.z;
        const uint64_t step = order == Order::Shuffled ? coprime(all) : 1;
        uint64_t at = order == Order::Shuffled ? random() % all : order == Order::Reverse ? all - 1 : 0;
        // FAKE_GPU_LAME breaks a kernel, to test that checks detect it: its last block does nothing.
        const uint64_t made = broken_kernel == kernel->name ? all - 1 : all;
        for (uint64_t i = 0; i < made; ++i) {
            shim_now.block = {(unsigned)(at % blocks.x), (unsigned)(at / blocks.x % blocks.y),
                              (unsigned)(at / blocks.x / blocks.y)};
            // No block may rely on data left by another.
            memset(shim_now.dynamic, 0xa5, shared);
            run_block();
            at = order == Order::Reverse ? at - 1 : (at + step) % all;
        }
    }

    // Whether the predicate is true in any thread.
    bool barrier(bool predicate) {
        state[current->thread] = State::AtBarrier;
        ++at_barrier;
        arrived |= predicate;
        release_barrier_if_complete();
        wait();
        // The next barrier is complete only after all threads have read this.
        return any;
    }

    void copy_async(unsigned* to, const void* from, unsigned bytes) {
        numbers.forget(to);
        if (const char* wrong = copies[current->thread].issue(to, from, bytes)) fail(wrong);
    }

    void commit_copies() { copies[current->thread].commit(); }
    void await_copies(unsigned later) { copies[current->thread].await(later); }

    void begin_group(float* d, const GroupOperand& left, const GroupOperand& right, bool bfloat16, unsigned columns) {
        if (const char* wrong = groups[current->thread].begin(d, left, right, bfloat16, columns)) fail(wrong);
    }

    void await_groups() { groups[current->thread].await(current->thread, numbers); }

    void warp_call(WarpCall& call) {
        const unsigned thread = current->thread;
        if (!(call.mask >> (thread % WARP) & 1)) fail("a lane calls a warp function with a mask that does not contain it");
        calls[thread] = &call;
        state[thread] = State::InWarpCall;
        waiting[thread / WARP] |= 1u << thread % WARP;
        release_warp_if_complete(thread / WARP, call.mask);
        wait();
    }

    // The main function of a fiber, which never ends. The host thread may be another one in each kernel.
    void fiber_loop() {
        for (;;) {
            while (ready.empty() && next < count) run_thread(start_order[next++]);
            Fiber* self = current;
            idle.push_back(self);
            if (living > 0) {
                current = pick();
                self->context.enter(current->context);
            } else {
                self->context.enter(home);
            }
        }
    }

    [[noreturn]] void fail(const char* what) {
        const uint3 block = shim_now.block;
        fprintf(stderr, "FAKE GPU: kernel %s, block (%u, %u, %u): %s\n", kernel->name, block.x, block.y, block.z, what);
        abort();
    }

  private:
    void run_block() {
        living = count;
        next = 0;
        at_barrier = 0;
        numbers.clear();
        arrived = false;
        std::fill_n(state, count, State::Unstarted);
        for (unsigned warp = 0; warp * WARP < count; ++warp) {
            const unsigned lanes = std::min(WARP, count - warp * WARP);
            alive[warp] = lanes == WARP ? ~0u : (1u << lanes) - 1;
            waiting[warp] = 0;
        }
        arrange(start_order, count);
        current = idle_fiber();
        home.enter(current->context);
    }

    void run_thread(unsigned thread) {
        Fiber* self = current;
        self->thread = thread;
        holder[thread] = self;
        state[thread] = State::Running;
        place(thread);
        kernel->call(arguments);
        check_stack(self);
        if (copies[thread].pending()) fail("a thread ends with asynchronous copies that it has not awaited");
        copies[thread].clear();
        if (groups[thread].pending()) fail("a thread ends with products of its warpgroup that it has not awaited");
        state[thread] = State::Done;
        alive[thread / WARP] &= ~(1u << thread % WARP);
        --living;
        // The waiting threads may now be all that are alive.
        if (at_barrier > 0) release_barrier_if_complete();
        const unsigned warp = thread / WARP;
        for (unsigned lanes = waiting[warp]; (lanes & waiting[warp]) != 0; lanes &= lanes - 1) {
            release_warp_if_complete(warp, calls[warp * WARP + (unsigned)__builtin_ctz(lanes)]->mask);
        }
    }

    void place(unsigned thread) {
        const uint3 size = shim_now.threads;
        if (size.x == count) {
            shim_now.thread = {thread, 0, 0};
            return;
        }
        shim_now.thread = {thread % size.x, thread / size.x % size.y, thread / size.x / size.y};
    }

    void wait() {
        Fiber* self = current;
        Fiber* other = pick();
        if (other != self) {
            current = other;
            self->context.enter(other->context);
        }
        state[self->thread] = State::Running;
        place(self->thread);
    }

    // Selects the next fiber: of a released thread, else of a new one. There must be one.
    Fiber* pick() {
        if (!ready.empty()) {
            Fiber* fiber = ready.front();
            ready.pop_front();
            return fiber;
        }
        if (next < count) return idle_fiber();
        fail_stuck();
    }

    void release_barrier_if_complete() {
        if (at_barrier < living) return;
        at_barrier = 0;
        numbers.clear();
        any = arrived;
        arrived = false;
        std::copy_n(start_order, count, released);
        if (order == Order::Shuffled) arrange(released, count);
        for (unsigned i = 0; i < count; ++i) {
            if (state[released[i]] == State::AtBarrier) release(released[i]);
        }
    }

    void release_warp_if_complete(unsigned warp, unsigned mask) {
        const unsigned needed = mask & alive[warp], first = warp * WARP;
        if (needed == 0 || (needed & ~waiting[warp]) != 0) return;
        WarpCall* lanes[WARP] = {};
        for (unsigned lane = 0; lane < WARP; ++lane) {
            if (!(needed >> lane & 1)) continue;
            if (calls[first + lane]->mask != mask) return;
            lanes[lane] = calls[first + lane];
        }
        waiting[warp] &= ~needed;
        if (const char* wrong = exchange(lanes)) fail(wrong);
        unsigned lane_order[WARP];
        arrange(lane_order, WARP);
        for (unsigned lane : lane_order) {
            if (lanes[lane] != nullptr) release(first + lane);
        }
    }

    void release(unsigned thread) {
        state[thread] = State::Running;
        ready.push_back(holder[thread]);
    }

    Fiber* idle_fiber() {
        if (idle.empty()) return new_fiber();
        Fiber* fiber = idle.back();
        idle.pop_back();
        return fiber;
    }

    Fiber* new_fiber() {
        auto fiber = std::make_unique<Fiber>();
        void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) fail("no memory for a thread's stack");
        fiber->stack = (unsigned char*)stack;
        memcpy(fiber->stack, &CANARY, sizeof CANARY);
        // Equally aligned stacks would compete for the same few cache sets: 17 lines apart, they use all of them.
        fiber->context.prepare(fiber->stack + STACK - fibers.size() % 64 * 1088, fiber_main);
        fibers.push_back(std::move(fiber));
        return fibers.back().get();
    }

    void check_stack(const Fiber* fiber) {
        if (memcmp(fiber->stack, &CANARY, sizeof CANARY) != 0) fail("a thread's local variables overflow its stack");
    }

    void arrange(unsigned* numbers, unsigned length) {
        for (unsigned i = 0; i < length; ++i) numbers[i] = order == Order::Reverse ? length - 1 - i : i;
        if (order != Order::Shuffled) return;
        for (unsigned i = length; i > 1; --i) std::swap(numbers[i - 1], numbers[random() % i]);
    }

    uint64_t random() {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        return seed >> 11;
    }

    // A step size that visits every block once.
    uint64_t coprime(uint64_t all) {
        for (;;) {
            const uint64_t step = random() % all + 1;
            uint64_t a = step, b = all;
            while (b != 0) std::swap(a %= b, b);
            if (a == 1) return step;
        }
    }

    [[noreturn]] void fail_stuck() {
        unsigned in_warp = 0, example = 0;
        for (unsigned thread = 0; thread < count; ++thread) {
            if (state[thread] != State::InWarpCall) continue;
            ++in_warp;
            example = thread;
        }
        char text[240];
        int length = snprintf(text, sizeof text,
                              "a barrier that not all threads reach: of %u threads %u have ended, %u wait in "
                              "__syncthreads, %u in a warp function",
                              count, count - living, at_barrier, in_warp);
        if (in_warp > 0) {
            snprintf(text + length, sizeof text - length, " (thread %u with mask %08x)", example, calls[example]->mask);
        }
        fail(text);
    }

    const Kernel* kernel = nullptr;
    void** arguments = nullptr;
    Context home;
    Fiber* current = nullptr;
    unsigned count = 0, living = 0, next = 0, at_barrier = 0;
    bool arrived = false, any = false;   // __syncthreads_or: of the threads at the barrier, and of the last one
    State state[MOST_THREADS];
    Fiber* holder[MOST_THREADS];
    unsigned alive[MOST_THREADS / WARP];     // the live lanes of each warp
    unsigned waiting[MOST_THREADS / WARP];   // the lanes in a warp function
    WarpCall* calls[MOST_THREADS];
    Copies copies[MOST_THREADS];
    Groups groups[MOST_THREADS];
    GroupNumbers numbers;
    unsigned start_order[MOST_THREADS], released[MOST_THREADS];
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Fiber*> idle;
    std::deque<Fiber*> ready;
    std::vector<unsigned char> dynamic;
    std::mutex running;
    const Order order = order_asked_for();
    const std::string broken_kernel = kernel_made_wrong();
    uint64_t seed = seed_asked_for();
};

Engine& engine() {
    // Not destroyed at exit, because a stream may still be working.
    static Engine& only = *new Engine;
    return only;
}

// What the compiler passes to the handler of an access at a misaligned address.
struct Access {
    const char* file;
    unsigned line, column;
    const void* type;
    unsigned char log_alignment, kind;
};

void fiber_main() { engine().fiber_loop(); }

Kernel*& kernels() {
    static Kernel* first = nullptr;
    return first;
}

}   // namespace

void add(Kernel* kernel) {
    kernel->next = kernels();
    kernels() = kernel;
}

const Kernel* find(const char* name) {
    for (const Kernel* kernel = kernels(); kernel != nullptr; kernel = kernel->next) {
        if (strcmp(kernel->name, name) == 0) return kernel;
    }
    return nullptr;
}

void launch(const Kernel& kernel, dim3 blocks, dim3 threads, unsigned shared, void** arguments) {
    engine().run(kernel, blocks, threads, shared, arguments);
}

void warp_call(WarpCall& call) { engine().warp_call(call); }

}   // namespace shim

// Kernels are compiled with -fsanitize=alignment: a GPU faults at an address that is not a multiple of the access.
extern "C" void __ubsan_handle_type_mismatch_v1_abort(const shim::Access* access, size_t address) {
    char text[200];
    snprintf(text, sizeof text, "misaligned address: %zx is not a multiple of %u (%s:%u)", address,
             1u << access->log_alignment, access->file, access->line);
    shim::engine().fail(text);
}

void __syncthreads() { shim::engine().barrier(false); }
int __syncthreads_or(int predicate) { return shim::engine().barrier(predicate != 0); }
void shim_copy_async(unsigned* to, const void* from, unsigned bytes) { shim::engine().copy_async(to, from, bytes); }
void shim_commit_copies() { shim::engine().commit_copies(); }
void shim_await_copies(unsigned later) { shim::engine().await_copies(later); }
void shim_group_multiply(
    float* d, const shim::GroupOperand& left, const shim::GroupOperand& right, bool bfloat16, unsigned columns) {
    shim::engine().begin_group(d, left, right, bfloat16, columns);
}
void shim_await_groups() { shim::engine().await_groups(); }
