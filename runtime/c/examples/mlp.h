// A small network and its data, for the examples: no communication here.
//
// A sample is one of ten classes: the centre of its class plus noise. Samples depend on their number only, so every rank can
// compute its own part of a batch.
#ifndef MLP_H
#define MLP_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

enum { INPUTS = 32, HIDDEN = 64, CLASSES = 10, BATCH = 120 };
enum { WEIGHT1 = HIDDEN * INPUTS, BIAS1 = HIDDEN, WEIGHT2 = CLASSES * HIDDEN, BIAS2 = CLASSES };
enum { PARAMETERS = WEIGHT1 + BIAS1 + WEIGHT2 + BIAS2 };

// A number from -1 to 1 that depends on `stream` and `index` only.
static inline float mlp_random(uint64_t stream, uint64_t index) {
    uint64_t z = stream * 0x9e3779b97f4a7c15u + index * 0xd1342543de82ef95u + 1;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (float)((double)((z ^ (z >> 31)) >> 11) / (double)(UINT64_C(1) << 52) - 1.0);
}

static inline int mlp_label(uint64_t sample) { return (int)(sample * 7919 % CLASSES); }

static inline void mlp_sample(uint64_t sample, float *inputs) {
    for (int i = 0; i < INPUTS; i++)
        inputs[i] = mlp_random(1, (uint64_t)(mlp_label(sample) * INPUTS + i)) + 1.5f * mlp_random(2, sample * INPUTS + (uint64_t)i);
}

static inline void mlp_initialise(float *parameters, uint64_t seed) {
    for (int i = 0; i < PARAMETERS; i++) parameters[i] = 0.2f * mlp_random(seed, (uint64_t)i);
}

// Forward and backward over the samples `first` to `first + count`. Writes the mean gradients of the four tensors, and
// returns the mean loss.
static inline float mlp_gradients(const float *parameters, uint64_t first, int count, float *weight1, float *bias1,
                                  float *weight2, float *bias2) {
    const float *w1 = parameters, *b1 = w1 + WEIGHT1, *w2 = b1 + BIAS1, *b2 = w2 + WEIGHT2;
    float inputs[INPUTS], hidden[HIDDEN], scores[CLASSES], delta[HIDDEN], loss = 0;
    for (int i = 0; i < WEIGHT1; i++) weight1[i] = 0;
    for (int i = 0; i < BIAS1; i++) bias1[i] = 0;
    for (int i = 0; i < WEIGHT2; i++) weight2[i] = 0;
    for (int i = 0; i < BIAS2; i++) bias2[i] = 0;
    for (int s = 0; s < count; s++) {
        mlp_sample(first + (uint64_t)s, inputs);
        for (int h = 0; h < HIDDEN; h++) {
            float sum = b1[h];
            for (int i = 0; i < INPUTS; i++) sum += w1[h * INPUTS + i] * inputs[i];
            hidden[h] = sum > 0 ? sum : 0;
            delta[h] = 0;
        }
        float largest = -INFINITY, total = 0;
        for (int c = 0; c < CLASSES; c++) {
            scores[c] = b2[c];
            for (int h = 0; h < HIDDEN; h++) scores[c] += w2[c * HIDDEN + h] * hidden[h];
            if (scores[c] > largest) largest = scores[c];
        }
        for (int c = 0; c < CLASSES; c++) total += scores[c] = expf(scores[c] - largest);
        int label = mlp_label(first + (uint64_t)s);
        loss -= logf(scores[label] / total) / (float)count;
        for (int c = 0; c < CLASSES; c++) {
            float error = (scores[c] / total - (c == label ? 1.0f : 0.0f)) / (float)count;
            bias2[c] += error;
            for (int h = 0; h < HIDDEN; h++) {
                weight2[c * HIDDEN + h] += error * hidden[h];
                delta[h] += error * w2[c * HIDDEN + h];
            }
        }
        for (int h = 0; h < HIDDEN; h++) {
            if (hidden[h] == 0) continue;
            bias1[h] += delta[h];
            for (int i = 0; i < INPUTS; i++) weight1[h * INPUTS + i] += delta[h] * inputs[i];
        }
    }
    return loss;
}

#endif
