// Execution of streams, events and graphs: queues with a thread each.
//
// Nothing is destroyed at exit, because threads may still be working, as a GPU may.
#include "fake_cuda.h"

#include <deque>
#include <thread>

namespace fake {

void EventRecord::pass() {
    {
        std::lock_guard lock(mutex);
        when = std::chrono::steady_clock::now();
        done.store(true, std::memory_order_release);
    }
    changed.notify_all();
}

void EventRecord::wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return passed(); });
}

long env_number(const char* variable, long otherwise) {
    const char* text = getenv(variable);
    return text == nullptr || *text == 0 ? otherwise : strtol(text, nullptr, 10);
}

void delay() {
    static const long most = env_number("FAKE_GPU_DELAY_US", 0);
    if (most <= 0) return;
    static std::atomic<uint64_t> drawn{(uint64_t)env_number("FAKE_GPU_SEED", 1) << 32};
    uint64_t number = drawn.fetch_add(1) * 0x9e3779b97f4a7c15;
    number = (number ^ (number >> 29)) * 0xbf58476d1ce4e5b9;
    std::this_thread::sleep_for(std::chrono::microseconds((number >> 33) % (uint64_t)most));
}

struct Queue {
    std::mutex mutex;
    std::condition_variable changed, completion;
    std::deque<Work> works;
    uint64_t submitted = 0, completed = 0;
    bool closed = false;
    bool started = false;
    uint64_t drains_noted = 0;   // `submitted` at the last counted drain
};

namespace {

void serve(QueuePtr queue) {
    for (;;) {
        Work work;
        {
            std::unique_lock lock(queue->mutex);
            queue->changed.wait(lock, [&] { return !queue->works.empty() || queue->closed; });
            if (queue->works.empty()) return;
            work = std::move(queue->works.front());
            queue->works.pop_front();
        }
        delay();
        work();
        // Resources of the work (a graph, a buffer) are released before its completion is visible.
        work = nullptr;
        std::lock_guard lock(queue->mutex);
        ++queue->completed;
        queue->completion.notify_all();
    }
}

}   // namespace

QueuePtr new_queue() { return std::make_shared<Queue>(); }

// The thread starts with the first work, because many streams are created and never used. It keeps the queue alive.
uint64_t submit(const QueuePtr& queue, Work work) {
    std::lock_guard lock(queue->mutex);
    queue->works.push_back(std::move(work));
    ++queue->submitted;
    if (!queue->started) std::thread(serve, queue).detach();
    queue->started = true;
    queue->changed.notify_one();
    return queue->submitted;
}

void note_drain(Queue& queue, uint64_t position) {
    std::lock_guard lock(queue.mutex);
    if (position < queue.submitted || queue.drains_noted == queue.submitted) return;
    queue.drains_noted = queue.submitted;
    count(Count::Drains);
}

void close(Queue& queue) {
    std::lock_guard lock(queue.mutex);
    queue.closed = true;
    queue.changed.notify_one();
}

bool is_drained(Queue& queue) {
    std::lock_guard lock(queue.mutex);
    return queue.completed == queue.submitted;
}

void drain(Queue& queue) {
    std::unique_lock lock(queue.mutex);
    const uint64_t goal = queue.submitted;
    queue.completion.wait(lock, [&] { return queue.completed >= goal; });
}

ExecutableGraph::ExecutableGraph(std::shared_ptr<const std::vector<Node>> captured) : nodes(std::move(captured)) {
    std::map<const void*, size_t> known;
    for (unsigned i = 0; i < nodes->size(); ++i) {
        const auto [lane, added] = known.try_emplace((*nodes)[i].lane, lanes.size());
        if (added) lanes.emplace_back();
        lanes[lane->second].push_back(i);
    }
    for (size_t i = 1; i < lanes.size(); ++i) helpers.push_back(new_queue());
}

ExecutableGraph::~ExecutableGraph() {
    for (auto& helper : helpers) close(*helper);
}

// Branches of the graph overlap like streams, so an edge missing in the capture is also missing here.
void ExecutableGraph::run(const ExternalEvents& events) {
    std::lock_guard lock(running);
    std::vector<EventRecord> done(nodes->size());
    auto run_lane = [&](size_t lane) {
        for (unsigned i : lanes[lane]) {
            for (unsigned before : (*nodes)[i].after) done[before].wait();
            delay();
            const Node& node = (*nodes)[i];
            if (node.records != nullptr) events[i]->pass();
            if (node.awaits != nullptr && events[i] != nullptr) events[i]->wait();
            if (node.work != nullptr) node.work();
            done[i].pass();
        }
    };
    for (size_t lane = 1; lane < lanes.size(); ++lane) submit(helpers[lane - 1], [&, lane] { run_lane(lane); });
    if (!lanes.empty()) run_lane(0);
    for (auto& helper : helpers) drain(*helper);
}

}   // namespace fake
