// simcu_warp.h: warp collectives, cached loads and atomics of the device language. Part of simcu.h.
//
// A collective waits for every lane of its mask; a lane that has left, another mask or another place in the code ends the process with a message
// (simcu_sync.cc). A shuffle that reads a lane outside its mask does too: on a GPU the value is undefined.
#pragma once

namespace simcu {

template <class T> struct Shuffle {
    T in, out;
    int source;
    bool own; // the source lies outside the segment: the lane keeps its value
};
template <class T> SIMCU_NOTSAN void shuffle_done(void **slots, unsigned mask, const char *file, int line) {
    for (int i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        auto *s = (Shuffle<T> *)slots[i];
        if (!s->own && !(mask >> s->source & 1)) fail(file, line, "shuffle: lane %d reads lane %d, which is not in mask %08x", i, s->source, mask);
        s->out = s->own ? s->in : ((Shuffle<T> *)slots[s->source])->in;
    }
}
template <class T> T shuffle(unsigned mask, T value, int source, bool own, const char *file, int line) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a shuffle moves up to 8 bytes");
    Shuffle<T> s{value, value, source & 31, own};
    warp_collective(mask, "__shfl_sync", &s, shuffle_done<T>, file, line);
    return s.out;
}

template <class T> struct Reduction { T in, out; };
enum { REDUCE_ADD, REDUCE_MIN, REDUCE_MAX, REDUCE_AND, REDUCE_OR, REDUCE_XOR, REDUCE_BALLOT };
template <class T, int OPERATION> SIMCU_NOTSAN void reduction_done(void **slots, unsigned mask, const char *, int) {
    bool first = true;
    T r{};
    for (int i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        const T v = ((Reduction<T> *)slots[i])->in;
        if constexpr (OPERATION == REDUCE_BALLOT)
            r |= (T)(v ? 1u : 0u) << i;
        else if (first)
            r = v;
        else if constexpr (OPERATION == REDUCE_ADD)
            r += v;
        else if constexpr (OPERATION == REDUCE_MIN)
            r = v < r ? v : r;
        else if constexpr (OPERATION == REDUCE_MAX)
            r = v > r ? v : r;
        else if constexpr (OPERATION == REDUCE_AND)
            r &= v;
        else if constexpr (OPERATION == REDUCE_OR)
            r |= v;
        else
            r ^= v;
        first = false;
    }
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) ((Reduction<T> *)slots[i])->out = r;
}
template <int OPERATION, class T> T reduce(unsigned mask, T value, const char *what, const char *file, int line) {
    Reduction<T> r{value, value};
    warp_collective(mask, what, &r, reduction_done<T, OPERATION>, file, line);
    return r.out;
}
inline void nothing_done(void **, unsigned, const char *, int) {}

// Match: the lanes of the mask that hold the same value.
template <class T> struct Match {
    T in;
    unsigned out;
};
template <class T> SIMCU_NOTSAN void match_done(void **slots, unsigned mask, const char *, int) {
    for (int i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        auto *s = (Match<T> *)slots[i];
        s->out = 0;
        for (int k = 0; k < 32; k++) s->out |= (unsigned)((mask >> k & 1) && ((Match<T> *)slots[k])->in == s->in) << k;
    }
}

} // namespace simcu

template <class T> T __shfl_sync(unsigned mask, T v, int source, int width = 32, SIMCU_AT) {
    const int l = simcu::lane();
    return simcu::shuffle(mask, v, (l & ~(width - 1)) | (source & (width - 1)), false, SIMCU_HERE);
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, SIMCU_AT) {
    const int l = simcu::lane(), source = l ^ bits;
    return simcu::shuffle(mask, v, source, source >= (l & ~(width - 1)) + width, SIMCU_HERE);
}
template <class T> T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, SIMCU_AT) {
    const int l = simcu::lane(), source = l + (int)delta;
    return simcu::shuffle(mask, v, source, source >= (l & ~(width - 1)) + width, SIMCU_HERE);
}
template <class T> T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, SIMCU_AT) {
    const int l = simcu::lane(), source = l - (int)delta;
    return simcu::shuffle(mask, v, source, source < (l & ~(width - 1)), SIMCU_HERE);
}
inline unsigned __ballot_sync(unsigned mask, int p, SIMCU_AT) {
    return simcu::reduce<simcu::REDUCE_BALLOT, unsigned>(mask, p != 0, "__ballot_sync", SIMCU_HERE);
}
inline int __any_sync(unsigned mask, int p, SIMCU_AT) { return simcu::reduce<simcu::REDUCE_OR, int>(mask, p != 0, "__any_sync", SIMCU_HERE); }
inline int __all_sync(unsigned mask, int p, SIMCU_AT) { return simcu::reduce<simcu::REDUCE_AND, int>(mask, p != 0, "__all_sync", SIMCU_HERE); }
#define SIMCU_REDUCE(name, OPERATION, T)                                                                                                           \
    inline T name(unsigned mask, T v, SIMCU_AT) { return simcu::reduce<simcu::OPERATION, T>(mask, v, #name, SIMCU_HERE); }
SIMCU_REDUCE(__reduce_add_sync, REDUCE_ADD, unsigned)
SIMCU_REDUCE(__reduce_add_sync, REDUCE_ADD, int)
SIMCU_REDUCE(__reduce_min_sync, REDUCE_MIN, unsigned)
SIMCU_REDUCE(__reduce_min_sync, REDUCE_MIN, int)
SIMCU_REDUCE(__reduce_max_sync, REDUCE_MAX, unsigned)
SIMCU_REDUCE(__reduce_max_sync, REDUCE_MAX, int)
SIMCU_REDUCE(__reduce_and_sync, REDUCE_AND, unsigned)
SIMCU_REDUCE(__reduce_or_sync, REDUCE_OR, unsigned)
SIMCU_REDUCE(__reduce_xor_sync, REDUCE_XOR, unsigned)
#undef SIMCU_REDUCE
template <class T> unsigned __match_any_sync(unsigned mask, T v, SIMCU_AT) {
    simcu::Match<T> m{v, 0};
    simcu::warp_collective(mask, "__match_any_sync", &m, simcu::match_done<T>, SIMCU_HERE);
    return m.out;
}
// A collective without a slot orders memory between the lanes; the others do not (race form).
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMCU_AT) {
    simcu::warp_collective(mask, "__syncwarp", nullptr, simcu::nothing_done, SIMCU_HERE);
}

// ---------------------------------------------------------------------------- loads and stores with cache hints
template <class T> T __ldg(const T *p) { return *p; }
template <class T> T __ldcs(const T *p) { return *p; }
template <class T> T __ldca(const T *p) { return *p; }
template <class T> T __ldcg(const T *p) { return *p; }
template <class T> T __ldlu(const T *p) { return *p; }
template <class T> T __ldcv(const T *p) { return *p; }
template <class T> void __stcs(T *p, std::common_type_t<T> v) { *p = v; }
template <class T> void __stcg(T *p, std::common_type_t<T> v) { *p = v; }
template <class T> void __stwt(T *p, std::common_type_t<T> v) { *p = v; }
template <class T> void __stwb(T *p, std::common_type_t<T> v) { *p = v; }

// ---------------------------------------------------------------------------- atomics: old is the value before
#define SIMCU_ATOMIC(name, expression)                                                                                                             \
    template <class T> SIMCU_NOTSAN T name(T *p, std::common_type_t<T> v) {                                                                        \
        simcu::atomic_note(p, sizeof(T));                                                                                                          \
        const T old = *p;                                                                                                                          \
        *p = (expression);                                                                                                                         \
        return old;                                                                                                                                \
    }
SIMCU_ATOMIC(atomicAdd, (T)(old + v))
SIMCU_ATOMIC(atomicSub, (T)(old - v))
SIMCU_ATOMIC(atomicExch, v)
SIMCU_ATOMIC(atomicMin, v < old ? v : old)
SIMCU_ATOMIC(atomicMax, old < v ? v : old)
SIMCU_ATOMIC(atomicAnd, (T)(old &v))
SIMCU_ATOMIC(atomicOr, (T)(old | v))
SIMCU_ATOMIC(atomicXor, (T)(old ^ v))
SIMCU_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
#undef SIMCU_ATOMIC
template <class T> SIMCU_NOTSAN T atomicCAS(T *p, std::common_type_t<T> compare, std::common_type_t<T> v) {
    simcu::atomic_note(p, sizeof(T));
    const T old = *p;
    if (old == compare) *p = v;
    return old;
}
