// Optimizers: the constants of a step, and one pass over the contiguous arenas. See mod.rs for the formulas.
//
// Every operation is rounded separately, as on the CPU: a product contracted with the following sum would be more
// precise, but no longer equal. The pass is limited by memory bandwidth either way.

__device__ inline f32 add(f32 a, f32 b) { return __fadd_rn(a, b); }
__device__ inline f32 sub(f32 a, f32 b) { return __fsub_rn(a, b); }
__device__ inline f32 mul(f32 a, f32 b) { return __fmul_rn(a, b); }
__device__ inline f64 mul(f64 a, f64 b) { return __dmul_rn(a, b); }

// As on the CPU, states below the smallest normal number are zero, and so is what squares of gradients add to them.
#define SMALLEST_NORMAL 1.17549435e-38f
__device__ inline f32 normal(f32 state) { return fabsf(state) < SMALLEST_NORMAL ? 0.0f : state; }
__device__ inline f32 least_squared(f32 towards) { return sqrtf(SMALLEST_NORMAL / towards); }
__device__ inline f32 scaled_square(f32 gradient, f32 towards, f32 least) {
    if (fabsf(gradient) < least) gradient = 0.0f;
    return mul(mul(towards, gradient), gradient);
}

#define RULE_ADAM 0
#define RULE_ADAM_W 1
#define RULE_RMS_PROP 2
#define RULE_SGD 3

#define DECAY_CONSTANT 0
#define DECAY_LINEAR 1
#define DECAY_COSINE 2
#define DECAY_STEP 3

struct UpdatePlan {
    u64 steps_per_epoch;
    u64 warm_up;      // steps in which the learning rate increases
    u64 decay_steps;  // steps over which it decreases, or between two decreases
    f64 decay_to;     // the cosine's floor, or the factor of each decrease
    f64 learning_rate;
    f64 decays[2];  // Adam's beta1 and beta2, RMSprop's rho and momentum, SGD's momentum and dampening
    f64 epsilon;
    f64 weight_decay;
    f64 growth;   // of the loss scale
    f64 backoff;
    u32 growth_interval;  // 0 without a loss scale
    u32 rule;
    u32 nesterov;
    u32 decay;
};

// Indices of the constants, which step_begin writes and the rules read.
#define ADAM_ROOT 1
#define ADAM_TOWARDS_FIRST 2
#define ADAM_BETA2 3
#define ADAM_TOWARDS_SECOND 4
#define ADAM_EPSILON 5
#define RMS_RHO 1
#define RMS_TOWARDS 2
#define RMS_EPSILON 3
#define RMS_MOMENTUM 4
#define SGD_OLD 1
#define SGD_NEW 2
#define SGD_AHEAD 3
#define SGD_ALONG 4
#define WEIGHT_DECAY 7

// The factor of the learning rate, see schedule.rs.
__device__ inline f64 schedule_factor(const UpdatePlan& plan, u64 step) {
    if (step < plan.warm_up) return (f64)(step + 1) / (f64)plan.warm_up;
    step -= plan.warm_up;
    const u64 fallen = step < plan.decay_steps ? step : plan.decay_steps;
    const f64 part = (f64)fallen / (f64)plan.decay_steps;
    if (plan.decay == DECAY_LINEAR) return 1.0 - part;
    if (plan.decay == DECAY_COSINE) {
        const f64 wave = mul(0.5, 1.0 + cos(mul(3.14159265358979323846, part)));
        return plan.decay_to + mul(1.0 - plan.decay_to, wave);
    }
    if (plan.decay == DECAY_STEP) return pow(plan.decay_to, (f64)(step / plan.decay_steps));
    return 1.0;
}

#define LEAST_LOSS_SCALE SMALLEST_NORMAL

// Changes the loss scale after the last step that began with this state, see loss_scale.rs. At the smallest scale,
// non-finite gradients are no matter of the scale.
__device__ inline void advance_loss_scale(StepState* state, const UpdatePlan& plan) {
    const bool overflowed = state->non_finite != 0;
    if (!state->begun || (overflowed && state->loss_scale <= LEAST_LOSS_SCALE)) return;
    const f32 scale = (f32)mul((f64)state->loss_scale, overflowed ? plan.backoff : plan.growth);
    if (overflowed) {
        state->loss_scale = most(scale, LEAST_LOSS_SCALE);
        state->good_steps = 0;
        state->skipped++;
        state->non_finite = 0;
    } else if (state->good_steps + 1 < plan.growth_interval) {
        state->good_steps++;
    } else {
        if (bits_of(scale) < 0x7f800000u) state->loss_scale = scale;
        state->good_steps = 0;
    }
}

// Advances the state to the next step. One thread: all other kernels of the step wait for it anyway.
KERNEL(step_begin)(StepState* state, UpdatePlan plan) {
    if (grid_thread() > 0) return;
    if (plan.growth_interval > 0) advance_loss_scale(state, plan);
    if (state->non_finite) {
        state->halted = 1;
        return;
    }
    const u64 step = state->step + 1;
    // The optimizer does not count steps that were skipped.
    const u64 updates = step - state->skipped;
    const f64 rate = mul(plan.learning_rate, schedule_factor(plan, step));
    const f64 first = plan.decays[0], second = plan.decays[1];
    f32 constants[8] = {};
    f64 step_size = rate;
    constants[WEIGHT_DECAY] = (f32)plan.weight_decay;
    if (plan.rule == RULE_ADAM || plan.rule == RULE_ADAM_W) {
        const f64 t = (f64)(updates + 1);
        const f64 correction1 = 1.0 - pow(first, t), correction2 = 1.0 - pow(second, t);
        step_size = rate / correction1;
        constants[ADAM_ROOT] = (f32)(1.0 / sqrt(correction2));
        constants[ADAM_TOWARDS_FIRST] = (f32)(1.0 - first);
        constants[ADAM_BETA2] = (f32)second;
        constants[ADAM_TOWARDS_SECOND] = (f32)(1.0 - second);
        constants[ADAM_EPSILON] = (f32)plan.epsilon;
    } else if (plan.rule == RULE_RMS_PROP) {
        constants[RMS_RHO] = (f32)first;
        constants[RMS_TOWARDS] = (f32)(1.0 - first);
        constants[RMS_EPSILON] = (f32)plan.epsilon;
        constants[RMS_MOMENTUM] = (f32)second;
    } else {
        // In the first update the momentum is the gradient itself.
        constants[SGD_OLD] = updates == 0 ? 0.0f : (f32)first;
        constants[SGD_NEW] = updates == 0 ? 1.0f : (f32)(1.0 - second);
        constants[SGD_AHEAD] = plan.nesterov ? 1.0f : 0.0f;
        constants[SGD_ALONG] = plan.nesterov ? (f32)first : 1.0f;
    }
    state->step = step;
    state->position = step % plan.steps_per_epoch;
    state->learning_rate = rate;
    state->scale = plan.growth_interval > 0 ? (f32)(1.0 / (f64)state->loss_scale) : 1.0f;
    state->begun = 1;
    state->step_size = step_size;
    state->shrink = mul(rate, plan.weight_decay);
    for (u32 i = 0; i < 8; i++) state->constants[i] = constants[i];
}

// A range of one tensor, with one factor of the learning rate and one of the weight decay.
struct Chunk {
    u32 begin;  // in the arena, a multiple of 4
    u32 len;
    u32 state;  // in the arenas of states and average, a multiple of 4
    f32 learning_rate;
    f32 weight_decay;
};

// The rates of a chunk: the state's constants times the chunk's factors, multiplied in f64 and rounded once, as on
// the CPU.
struct Rates {
    f32 rate;
    f32 decay;  // weight of the parameters that are added to gradients
    f32 keep;   // factor by which AdamW shrinks a parameter

    __device__ Rates(const StepState* state, const Chunk& chunk)
        : rate((f32)mul(state->step_size, (f64)chunk.learning_rate)),
          decay(mul(state->constants[WEIGHT_DECAY], chunk.weight_decay)),
          keep((f32)(1.0 - mul(state->shrink, mul((f64)chunk.learning_rate, (f64)chunk.weight_decay)))) {}
};

// Each rule has a number of states, and updates one parameter and its states with one gradient, at the chunk's rates.

struct AdamRule {
    static constexpr u32 STATES = 2;
    f32 root, towards_first, beta2, towards_second, epsilon, least;

    __device__ explicit AdamRule(const f32* constants)
        : root(constants[ADAM_ROOT]),
          towards_first(constants[ADAM_TOWARDS_FIRST]),
          beta2(constants[ADAM_BETA2]),
          towards_second(constants[ADAM_TOWARDS_SECOND]),
          epsilon(constants[ADAM_EPSILON]),
          least(least_squared(towards_second)) {}

    __device__ void move(f32& param, f32 gradient, f32& m, f32& v, f32 rate) const {
        m = normal(add(m, mul(towards_first, sub(gradient, m))));
        v = normal(add(mul(beta2, v), scaled_square(gradient, towards_second, least)));
        param = sub(param, mul(rate, m) / add(mul(sqrtf(v), root), epsilon));
    }

    __device__ void update(f32& param, f32 gradient, f32& m, f32& v, const Rates& rates) const {
        move(param, add(gradient, mul(rates.decay, param)), m, v, rates.rate);
    }
};

struct AdamWRule : AdamRule {
    __device__ explicit AdamWRule(const f32* constants) : AdamRule(constants) {}

    __device__ void update(f32& param, f32 gradient, f32& m, f32& v, const Rates& rates) const {
        param = mul(param, rates.keep);
        move(param, gradient, m, v, rates.rate);
    }
};

template <bool MOMENTUM>
struct RmsPropRule {
    static constexpr u32 STATES = MOMENTUM ? 2 : 1;
    f32 rho, towards, epsilon, momentum, least;

    __device__ explicit RmsPropRule(const f32* constants)
        : rho(constants[RMS_RHO]),
          towards(constants[RMS_TOWARDS]),
          epsilon(constants[RMS_EPSILON]),
          momentum(constants[RMS_MOMENTUM]),
          least(least_squared(towards)) {}

    __device__ void update(f32& param, f32 gradient, f32& mean, f32& buffer, const Rates& rates) const {
        gradient = add(gradient, mul(rates.decay, param));
        mean = normal(add(mul(rho, mean), scaled_square(gradient, towards, least)));
        f32 move = gradient / add(sqrtf(mean), epsilon);
        if (MOMENTUM) move = buffer = normal(add(mul(momentum, buffer), move));
        param = sub(param, mul(rates.rate, move));
    }
};

template <bool MOMENTUM>
struct SgdRule {
    static constexpr u32 STATES = MOMENTUM ? 1 : 0;
    f32 old_share, new_share, ahead, along;

    __device__ explicit SgdRule(const f32* constants)
        : old_share(constants[SGD_OLD]),
          new_share(constants[SGD_NEW]),
          ahead(constants[SGD_AHEAD]),
          along(constants[SGD_ALONG]) {}

    __device__ void update(f32& param, f32 gradient, f32& buffer, f32&, const Rates& rates) const {
        gradient = add(gradient, mul(rates.decay, param));
        if (MOMENTUM) {
            buffer = normal(add(mul(old_share, buffer), mul(new_share, gradient)));
            gradient = add(mul(ahead, gradient), mul(along, buffer));
        }
        param = sub(param, mul(rates.rate, gradient));
    }
};

// Matching arenas of `len` elements, those of states and average of `state_len`. States that the rule does not use,
// the average and the copy may be null. The copy is of bf16 or f16.
struct Arenas {
    const f32* gradients;
    f32* params;
    f32* first;
    f32* second;
    f32* average;
    u16* copy;
    u32 len;
    u32 state_len;
    f32 towards;  // weight of the parameters in their moving average
    u32 copies_f16;
};

// With a table made for other arenas, nothing outside of these is accessed.
__device__ inline bool chunk_within(u32 begin, u32 chunk_len, u32 len) {
    return begin <= len && chunk_len <= len - begin;
}

// `at` is the index in the arena, `own` that in the arenas of states and average.
template <class Rule, u32 N>
__device__ void optimizer_pack(
    const Rule& rule, const Arenas& arenas, f32 scale, const Rates& rates, u32 at, u32 own) {
    const Pack<f32, N> gradients = load_pack<N>(arenas.gradients + at);
    Pack<f32, N> params = load_pack<N>(arenas.params + at), first = {}, second = {};
    if (Rule::STATES > 0) first = load_pack<N>(arenas.first + own);
    if (Rule::STATES > 1) second = load_pack<N>(arenas.second + own);
    for (u32 j = 0; j < N; j++) {
        const f32 gradient = mul(gradients.at[j], scale);
        rule.update(params.at[j], gradient, first.at[j], second.at[j], rates);
    }
    store_pack<N>(arenas.params + at, params);
    if (Rule::STATES > 0) store_pack<N>(arenas.first + own, first);
    if (Rule::STATES > 1) store_pack<N>(arenas.second + own, second);
    if (arenas.average) {
        Pack<f32, N> average = load_pack<N>(arenas.average + own);
        for (u32 j = 0; j < N; j++) {
            average.at[j] = add(average.at[j], mul(arenas.towards, sub(params.at[j], average.at[j])));
        }
        store_pack<N>(arenas.average + own, average);
    }
    if (arenas.copy) {
        Pack<u16, N> copy;
        for (u32 j = 0; j < N; j++) {
            const f32 param = params.at[j];
            copy.at[j] = arenas.copies_f16 ? from_f32<f16>(param).bits : from_f32<bf16>(param).bits;
        }
        store_pack<N>(arenas.copy + at, copy);
    }
}

// Each block processes whole chunks. After non-finite gradients nothing changes.
template <class Rule>
__device__ void optimizer_update(const StepState* state, const Chunk* chunks, u32 count, const Arenas& arenas) {
    constexpr u32 N = PACK<f32>;
    if (state->non_finite) return;
    const Rule rule(state->constants);
    const f32 scale = state->scale;
    for (u32 index = blockIdx.x; index < count; index += gridDim.x) {
        const Chunk chunk = chunks[index];
        if (!chunk_within(chunk.begin, chunk.len, arenas.len)) continue;
        if (!chunk_within(chunk.state, chunk.len, arenas.state_len)) continue;
        const Rates rates(state, chunk);
        const u32 packs = chunk.len / N;
        for (u32 i = threadIdx.x; i < packs; i += blockDim.x) {
            optimizer_pack<Rule, N>(rule, arenas, scale, rates, chunk.begin + i * N, chunk.state + i * N);
        }
        const u32 rest = packs * N + threadIdx.x;
        if (rest < chunk.len) {
            optimizer_pack<Rule, 1>(rule, arenas, scale, rates, chunk.begin + rest, chunk.state + rest);
        }
    }
}

KERNEL(optimizer_update_adam)(const StepState* state, const Chunk* chunks, u32 count, Arenas arenas) {
    optimizer_update<AdamRule>(state, chunks, count, arenas);
}
KERNEL(optimizer_update_adamw)(const StepState* state, const Chunk* chunks, u32 count, Arenas arenas) {
    optimizer_update<AdamWRule>(state, chunks, count, arenas);
}
KERNEL(optimizer_update_rmsprop)(const StepState* state, const Chunk* chunks, u32 count, Arenas arenas) {
    optimizer_update<RmsPropRule<false>>(state, chunks, count, arenas);
}
KERNEL(optimizer_update_rmsprop_momentum)(const StepState* state, const Chunk* chunks, u32 count, Arenas arenas) {
    optimizer_update<RmsPropRule<true>>(state, chunks, count, arenas);
}
KERNEL(optimizer_update_sgd)(const StepState* state, const Chunk* chunks, u32 count, Arenas arenas) {
    optimizer_update<SgdRule<false>>(state, chunks, count, arenas);
}
KERNEL(optimizer_update_sgd_momentum)(const StepState* state, const Chunk* chunks, u32 count, Arenas arenas) {
    optimizer_update<SgdRule<true>>(state, chunks, count, arenas);
}

// Clipping: each chunk's squares are summed, and these sums by one block, always in the same order.

#define NORM_THREADS 256

KERNEL_BOUNDS(optimizer_squares, NORM_THREADS)(
    const f32* gradients, u32 len, const Chunk* chunks, u32 count, f64* sums) {
    constexpr u32 N = PACK<f32>;
    __shared__ f64 scratch[NORM_THREADS / WARP];
    for (u32 index = blockIdx.x; index < count; index += gridDim.x) {
        const Chunk chunk = chunks[index];
        if (!chunk_within(chunk.begin, chunk.len, len)) continue;
        const u32 packs = chunk.len / N, rest = packs * N + threadIdx.x;
        f64 mine = 0.0;
        for (u32 i = threadIdx.x; i < packs; i += blockDim.x) {
            const Pack<f32, N> pack = load_pack<N>(gradients + chunk.begin + i * N);
            for (u32 j = 0; j < N; j++) mine += (f64)pack.at[j] * (f64)pack.at[j];
        }
        if (rest < chunk.len) mine += (f64)gradients[chunk.begin + rest] * (f64)gradients[chunk.begin + rest];
        const f64 sum = block_sum(mine, scratch);
        if (threadIdx.x == 0) sums[index] = sum;
    }
}

KERNEL_BOUNDS(optimizer_squares_total, NORM_THREADS)(const f64* sums, u32 count, StepState* state) {
    __shared__ f64 scratch[NORM_THREADS / WARP];
    f64 mine = 0.0;
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) mine += sums[i];
    const f64 total = block_sum(mine, scratch);
    if (threadIdx.x == 0) state->squares = total;
}

// Scales gradients with a norm above `most` down to it, besides dividing them by the loss scale. The small constant is
// that of PyTorch's clip_grad_norm_.
KERNEL(optimizer_clip)(StepState* state, f64 most) {
    if (grid_thread() > 0) return;
    const f64 norm = mul(sqrt(state->squares), (f64)state->scale), factor = most / (norm + 1e-6);
    state->norm = norm;
    if (factor < 1.0) state->scale = mul(state->scale, (f32)factor);
}
