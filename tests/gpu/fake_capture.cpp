// Streams, events, capture and graphs of the driver API.
#include "fake_cuda.h"

#include <algorithm>
#include <cstdlib>

namespace fake {

DriverState& driver_state() {
    static DriverState* all = new DriverState;
    return *all;
}

bool is_default(CUstream stream) { return (uintptr_t)stream <= 2; }

namespace {

thread_local char this_thread;   // its address identifies the thread
thread_local bool in_host_function = false;

bool exists(CUstream stream) { return driver_state().streams.count(stream) != 0; }
bool exists(CUevent event) { return driver_state().events.count(event) != 0; }

CUresult invalidate(Capture& capture, CUresult result) {
    capture.invalid = true;
    return result;
}

// Fails if the stream is unknown or being captured, for calls that query or wait for its work.
CUresult check_uncaptured(CUstream stream) {
    if (!exists(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr) return invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    return CUDA_SUCCESS;
}

bool forbidden_locked() {
    bool any = false;
    for (const auto& capture : driver_state().captures) {
        const bool ours = capture->thread == &this_thread && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        if (!ours && capture->mode != CU_STREAM_CAPTURE_MODE_GLOBAL) continue;
        capture->invalid = true;
        any = true;
    }
    return any;
}

// Whether a stream of the device is being captured, or one that the default stream waits for; their captures are
// invalidated.
bool captured_locked(int ordinal, bool blocking_only) {
    bool any = false;
    for (const auto& capture : driver_state().captures) {
        for (CUstream stream : capture->members) {
            const bool spared = blocking_only && (stream->flags & CU_STREAM_NON_BLOCKING) != 0;
            if (stream->ordinal != ordinal || spared) continue;
            capture->invalid = true;
            any = true;
        }
    }
    return any;
}

void merge(Dependencies& into, const Dependencies& from) {
    for (unsigned node : from) {
        if (std::find(into.begin(), into.end(), node) == into.end()) into.push_back(node);
    }
}

// Adds an external event node to the capture of a stream.
CUresult add_event_node(CUstream stream, CUevent records, CUevent awaits) {
    Capture& capture = *stream->capture;
    if (capture.invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    capture.nodes.push_back({nullptr, stream->tail, stream, records, awaits});
    stream->tail = {(unsigned)capture.nodes.size() - 1};
    return CUDA_SUCCESS;
}

// Marks an event as recorded by the last work of a stream.
void place(EventRecord& record, const QueuePtr& queue, uint64_t position) {
    record.queue = queue;
    record.position = position;
}

// Records the events of a graph's external event nodes for a launch, as far as they exist.
CUresult launch_events(const ExecutableGraph& program, ExternalEvents& events) {
    events.resize(program.nodes->size());
    for (size_t i = 0; i < events.size(); ++i) {
        const Node& node = (*program.nodes)[i];
        const CUevent event = node.records == nullptr ? node.awaits : node.records;
        if (event == nullptr) continue;
        if (!exists(event)) return CUDA_ERROR_INVALID_VALUE;
        if (node.records != nullptr) {
            event->moment = std::make_shared<EventRecord>();
            event->capture = nullptr;
        }
        events[i] = event->moment;
    }
    return CUDA_SUCCESS;
}

CUresult wait_in_capture(CUstream stream, CUevent event) {
    const CapturePtr& theirs = event->capture;
    if (theirs == nullptr) return invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    if (theirs->ended) return invalidate(*stream->capture, CUDA_ERROR_CAPTURED_EVENT);
    if (theirs != stream->capture) {
        invalidate(*theirs, CUDA_SUCCESS);
        return invalidate(*stream->capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
    }
    merge(stream->tail, event->nodes);
    return CUDA_SUCCESS;
}

// Whether the last nodes of every joined stream precede the last nodes of the origin.
bool all_joined(const Capture& capture) {
    std::vector<bool> before(capture.nodes.size());
    Dependencies open = capture.origin->tail;
    while (!open.empty()) {
        const unsigned node = open.back();
        open.pop_back();
        if (before[node]) continue;
        before[node] = true;
        for (unsigned earlier : capture.nodes[node].after) open.push_back(earlier);
    }
    for (CUstream stream : capture.members) {
        for (unsigned node : stream->tail) {
            if (!before[node]) return false;
        }
    }
    return true;
}

CUresult make_stream(CUstream* stream, unsigned flags, int priority) {
    const int ordinal = current_device();
    if (ordinal < 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (stream == nullptr || flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
    std::lock_guard lock(driver_state().mutex);
    *stream = new CUstream_st{ordinal, flags, priority, new_queue(), nullptr, {}};
    driver_state().streams.insert(*stream);
    return CUDA_SUCCESS;
}

}   // namespace

bool forbidden_in_capture() {
    std::lock_guard lock(driver_state().mutex);
    return forbidden_locked();
}

bool captured_on(int ordinal) {
    std::lock_guard lock(driver_state().mutex);
    return captured_locked(ordinal, false);
}

void wait_for_device(int ordinal, bool blocking_only) {
    std::vector<QueuePtr> queues;
    {
        std::lock_guard lock(driver_state().mutex);
        for (CUstream stream : driver_state().streams) {
            const bool spared = blocking_only && (stream->flags & CU_STREAM_NON_BLOCKING) != 0;
            if (stream->ordinal == ordinal && !spared) queues.push_back(stream->queue);
        }
    }
    for (auto& queue : queues) drain(*queue);
}

CUresult enqueue_locked(CUstream stream, Work work) {
    if (stream->capture == nullptr) {
        submit(stream->queue, std::move(work));
        return CUDA_SUCCESS;
    }
    Capture& capture = *stream->capture;
    if (capture.invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    capture.nodes.push_back({std::move(work), stream->tail, stream});
    stream->tail = {(unsigned)capture.nodes.size() - 1};
    return CUDA_SUCCESS;
}

CUresult enqueue(CUstream stream, Work work) {
    if (in_host_function) return CUDA_ERROR_NOT_PERMITTED;
    if (is_default(stream)) {
        const int ordinal = current_device();
        if (ordinal < 0) return CUDA_ERROR_INVALID_CONTEXT;
        {
            // In any mode: the default stream would depend on the captured one.
            std::lock_guard lock(driver_state().mutex);
            if (captured_locked(ordinal, true)) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        if (forbidden_in_capture()) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        wait_for_device(ordinal, true);
        work();
        return CUDA_SUCCESS;
    }
    std::lock_guard lock(driver_state().mutex);
    return exists(stream) ? enqueue_locked(stream, std::move(work)) : CUDA_ERROR_INVALID_HANDLE;
}

}   // namespace fake

using namespace fake;

API CUresult cuStreamCreate(CUstream* stream, unsigned flags) { return make_stream(stream, flags, 0); }
API CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int priority) {
    return make_stream(stream, flags, priority);
}

API CUresult cuStreamGetPriority(CUstream stream, int* priority) {
    std::lock_guard lock(driver_state().mutex);
    if (!exists(stream)) return CUDA_ERROR_INVALID_HANDLE;
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

API CUresult cuStreamGetFlags(CUstream stream, unsigned* flags) {
    std::lock_guard lock(driver_state().mutex);
    if (!exists(stream)) return CUDA_ERROR_INVALID_HANDLE;
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

API CUresult cuStreamGetId(CUstream stream, unsigned long long* id) {
    *id = (uintptr_t)stream;
    return CUDA_SUCCESS;
}

// Returns at once: the stream's remaining work still runs.
API CUresult cuStreamDestroy_v2(CUstream stream) {
    std::lock_guard lock(driver_state().mutex);
    if (!exists(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr) {
        auto& members = stream->capture->members;
        members.erase(std::remove(members.begin(), members.end(), stream), members.end());
        if (stream->capture->origin == stream) {
            stream->capture->ended = true;
            for (CUstream member : members) member->capture = nullptr;
            auto& all = driver_state().captures;
            all.erase(std::remove(all.begin(), all.end(), stream->capture), all.end());
        }
        stream->capture->invalid = true;
    }
    close(*stream->queue);
    driver_state().streams.erase(stream);
    delete stream;
    return CUDA_SUCCESS;
}

API CUresult cuStreamQuery(CUstream stream) {
    if (is_default(stream)) return CUDA_SUCCESS;
    std::lock_guard lock(driver_state().mutex);
    if (const CUresult result = check_uncaptured(stream)) return result;
    if (forbidden_locked()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    note_drain(*stream->queue);
    return is_drained(*stream->queue) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API CUresult cuStreamSynchronize(CUstream stream) {
    QueuePtr queue;
    if (is_default(stream)) return enqueue(stream, [] {});
    {
        std::lock_guard lock(driver_state().mutex);
        if (const CUresult result = check_uncaptured(stream)) return result;
        if (forbidden_locked()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        queue = stream->queue;
    }
    note_drain(*queue);
    drain(*queue);
    return CUDA_SUCCESS;
}

API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    std::unique_lock lock(driver_state().mutex);
    if (flags > CU_EVENT_WAIT_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
    if (!exists(event) || (!is_default(stream) && !exists(stream))) return CUDA_ERROR_INVALID_HANDLE;
    if (!is_default(stream) && stream->capture != nullptr) {
        return flags == 0 ? wait_in_capture(stream, event) : add_event_node(stream, nullptr, event);
    }
    if (event->capture != nullptr) {
        if (event->capture->ended) return CUDA_ERROR_CAPTURED_EVENT;
        if (is_default(stream)) return invalidate(*event->capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        // The stream joins the capture; its earlier work stays outside.
        stream->capture = event->capture;
        stream->tail = event->nodes;
        event->capture->members.push_back(stream);
        return CUDA_SUCCESS;
    }
    auto moment = event->moment;
    if (moment == nullptr) return CUDA_SUCCESS;
    if (!is_default(stream)) {
        submit(stream->queue, [moment] { moment->wait(); });
    } else {
        lock.unlock();
        moment->wait();
    }
    return CUDA_SUCCESS;
}

API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
    return enqueue(stream, [function, data] {
        in_host_function = true;
        function(data);
        in_host_function = false;
    });
}

API CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
    if (is_default(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    static std::atomic<unsigned long long> ids{1};
    std::lock_guard lock(driver_state().mutex);
    if (!exists(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    auto capture = std::make_shared<Capture>();
    capture->origin = stream;
    capture->mode = mode;
    capture->thread = &this_thread;
    capture->id = ids++;
    capture->members = {stream};
    stream->capture = capture;
    stream->tail.clear();
    driver_state().captures.push_back(capture);
    return CUDA_SUCCESS;
}

API CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    if (graph != nullptr) *graph = nullptr;
    std::lock_guard lock(driver_state().mutex);
    if (is_default(stream) || !exists(stream) || graph == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const CapturePtr capture = stream->capture;
    if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream) return invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    if (capture->thread != &this_thread && capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
        return invalidate(*capture, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    }
    const bool joined = all_joined(*capture);
    capture->ended = true;
    for (CUstream member : capture->members) {
        member->capture = nullptr;
        member->tail.clear();
    }
    auto& all = driver_state().captures;
    all.erase(std::remove(all.begin(), all.end(), capture), all.end());
    if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!joined) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    *graph = new CUgraph_st{std::make_shared<const std::vector<Node>>(std::move(capture->nodes))};
    driver_state().graphs.insert(*graph);
    return CUDA_SUCCESS;
}

API CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                       const CUgraphNode** dependencies, size_t* count) {
    if (graph != nullptr) *graph = nullptr;
    if (dependencies != nullptr) *dependencies = nullptr;
    if (count != nullptr) *count = 0;
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (is_default(stream)) return CUDA_SUCCESS;
    std::lock_guard lock(driver_state().mutex);
    if (!exists(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture == nullptr) return CUDA_SUCCESS;
    const bool invalid = stream->capture->invalid;
    *status = invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (id != nullptr) *id = stream->capture->id;
    return CUDA_SUCCESS;
}

API CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                       const CUgraphNode** dependencies, const CUgraphEdgeData** edges, size_t* count) {
    if (edges != nullptr) *edges = nullptr;
    return cuStreamGetCaptureInfo_v2(stream, status, id, graph, dependencies, count);
}

API CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    return cuStreamGetCaptureInfo_v2(stream, status, nullptr, nullptr, nullptr, nullptr);
}

API CUresult cuEventCreate(CUevent* event, unsigned flags) {
    const int ordinal = current_device();
    if (ordinal < 0) return CUDA_ERROR_INVALID_CONTEXT;
    std::lock_guard lock(driver_state().mutex);
    *event = new CUevent_st{ordinal, flags, nullptr, nullptr, {}};
    driver_state().events.insert(*event);
    return CUDA_SUCCESS;
}

API CUresult cuEventDestroy_v2(CUevent event) {
    std::lock_guard lock(driver_state().mutex);
    if (driver_state().events.erase(event) == 0) return CUDA_ERROR_INVALID_HANDLE;
    delete event;
    return CUDA_SUCCESS;
}

API CUresult cuEventRecord(CUevent event, CUstream stream) {
    {
        std::lock_guard lock(driver_state().mutex);
        if (!exists(event)) return CUDA_ERROR_INVALID_HANDLE;
        if (!is_default(stream)) {
            if (!exists(stream) || stream->ordinal != event->ordinal) return CUDA_ERROR_INVALID_HANDLE;
            if (stream->capture != nullptr && stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
            event->capture = stream->capture;
            event->nodes = stream->tail;
            if (stream->capture != nullptr) return CUDA_SUCCESS;
            auto moment = event->moment = std::make_shared<EventRecord>();
            place(*moment, stream->queue, submit(stream->queue, [moment] { moment->pass(); }));
            return CUDA_SUCCESS;
        }
    }
    if (const CUresult result = enqueue(stream, [] {})) return result;
    std::lock_guard lock(driver_state().mutex);
    event->capture = nullptr;
    event->moment = std::make_shared<EventRecord>();
    event->moment->pass();
    return CUDA_SUCCESS;
}

// In a capture an external record is a node, and every launch of the graph records the event.
API CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
    if (flags > CU_EVENT_RECORD_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
    if (flags != CU_EVENT_RECORD_EXTERNAL) return cuEventRecord(event, stream);
    std::lock_guard lock(driver_state().mutex);
    if (is_default(stream)) return CUDA_ERROR_INVALID_VALUE;
    if (!exists(event) || !exists(stream) || stream->ordinal != event->ordinal) return CUDA_ERROR_INVALID_HANDLE;
    // The flag is invalid outside of a capture.
    if (stream->capture == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return add_event_node(stream, event, nullptr);
}

API CUresult cuEventQuery(CUevent event) {
    std::lock_guard lock(driver_state().mutex);
    if (!exists(event)) return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture != nullptr) return invalidate(*event->capture, CUDA_ERROR_CAPTURED_EVENT);
    if (forbidden_locked()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (event->moment != nullptr && event->moment->queue != nullptr) {
        note_drain(*event->moment->queue, event->moment->position);
    }
    return event->moment == nullptr || event->moment->passed() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API CUresult cuEventSynchronize(CUevent event) {
    std::shared_ptr<EventRecord> moment;
    {
        std::lock_guard lock(driver_state().mutex);
        if (!exists(event)) return CUDA_ERROR_INVALID_HANDLE;
        if (event->capture != nullptr) return invalidate(*event->capture, CUDA_ERROR_CAPTURED_EVENT);
        if (forbidden_locked()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        moment = event->moment;
    }
    if (moment != nullptr && moment->queue != nullptr) note_drain(*moment->queue, moment->position);
    if (moment != nullptr) moment->wait();
    return CUDA_SUCCESS;
}

API CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
    std::lock_guard lock(driver_state().mutex);
    for (CUevent event : {start, end}) {
        if (!exists(event) || event->moment == nullptr) return CUDA_ERROR_INVALID_HANDLE;
        if ((event->flags & CU_EVENT_DISABLE_TIMING) != 0) return CUDA_ERROR_INVALID_HANDLE;
        if (event->capture != nullptr) return CUDA_ERROR_CAPTURED_EVENT;
    }
    if (!start->moment->passed() || !end->moment->passed()) return CUDA_ERROR_NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(end->moment->when - start->moment->when).count();
    return CUDA_SUCCESS;
}

API CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
    return cuEventElapsedTime_v2(milliseconds, start, end);
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec* program, CUgraph graph, unsigned long long) {
    std::lock_guard lock(driver_state().mutex);
    if (driver_state().graphs.count(graph) == 0) return CUDA_ERROR_INVALID_VALUE;
    note_graph(graph->nodes->size());
    *program = new CUgraphExec_st{std::make_shared<ExecutableGraph>(graph->nodes)};
    driver_state().programs.insert(*program);
    return CUDA_SUCCESS;
}

API CUresult cuGraphInstantiate_v2(CUgraphExec* program, CUgraph graph, CUgraphNode*, char*, size_t) {
    return cuGraphInstantiateWithFlags(program, graph, 0);
}

API CUresult cuGraphUpload(CUgraphExec program, CUstream) {
    std::lock_guard lock(driver_state().mutex);
    return driver_state().programs.count(program) == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API CUresult cuGraphLaunch(CUgraphExec program, CUstream stream) {
    std::unique_lock lock(driver_state().mutex);
    if (driver_state().programs.count(program) == 0) return CUDA_ERROR_INVALID_VALUE;
    const std::shared_ptr<ExecutableGraph> running = program->program;
    ExternalEvents events;
    if (const CUresult result = launch_events(*running, events)) return result;
    const bool at_once = !is_default(stream) && exists(stream) && stream->capture == nullptr;
    count(Count::Graphs);
    if (!at_once) {
        lock.unlock();
        return enqueue(stream, [running, events] { running->run(events); });
    }
    const uint64_t position = submit(stream->queue, [running, events] { running->run(events); });
    for (size_t i = 0; i < events.size(); ++i) {
        if ((*running->nodes)[i].records != nullptr) place(*events[i], stream->queue, position);
    }
    return CUDA_SUCCESS;
}

API CUresult cuGraphExecDestroy(CUgraphExec program) {
    std::lock_guard lock(driver_state().mutex);
    if (driver_state().programs.erase(program) == 0) return CUDA_ERROR_INVALID_VALUE;
    delete program;
    return CUDA_SUCCESS;
}

API CUresult cuGraphDestroy(CUgraph graph) {
    std::lock_guard lock(driver_state().mutex);
    if (driver_state().graphs.erase(graph) == 0) return CUDA_ERROR_INVALID_VALUE;
    delete graph;
    return CUDA_SUCCESS;
}

// Only the number of nodes: the nodes themselves are of no use to a caller.
API CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
    std::lock_guard lock(driver_state().mutex);
    if (driver_state().graphs.count(graph) == 0 || nodes != nullptr) return CUDA_ERROR_INVALID_VALUE;
    *count = graph->nodes->size();
    return CUDA_SUCCESS;
}
