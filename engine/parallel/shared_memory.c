/* Collectives and mailboxes among the processes of one host, through a memory segment that all of them map.

   Built and called by engine/parallel/shared_memory.py. The segment, a file of segment_bytes(size) zeros after a
   token of 16 bytes:

       control    a line for each rank: its step (`arrived`), and its operation there
       slots      two buffers for each rank, used in turn
       mailboxes  one for each ordered pair of ranks: a ring of bytes with a ring of descriptors

   Every collective takes one or more steps; all ranks take the same steps in the same order. A rank enters step s
   when all have entered s - 1, and so have finished s - 2: it may then write the buffer that was used in s - 2.
   Therefore no step needs a second barrier.

   Sums are in the order of ranks, 16-bit values in float32 and rounded once, so that all ranks get the same
   bits. A function returns 0; 1 + p if rank p of the group did not arrive in time; -1 - p if its process is
   gone; MISMATCH + p if it runs another operation in this step. After any error the group is unusable. */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE 128 /* two cache lines: the adjacent one is prefetched with it */
#define HEADER 4096
#define SLOT_BYTES ((size_t)256 << 10)
#define ONE_STEP_BYTES ((size_t)32 << 10) /* times two ranks: a larger sum is split over the ranks */
#define RING_BYTES ((size_t)8 << 20)
#define PIECE_BYTES ((size_t)256 << 10) /* of a message; the receiver copies one while the next is sent */
#define PIECES 64
#define BLOCK 1024 /* numbers summed at a time: their float32 sums stay in the first-level cache */
#define MISMATCH (1 << 20)
#define SPINS 4000 /* some 100 us */
#define YIELD_NS ((int64_t)1000000) /* a longer wait sleeps: waking up costs tens of us */
#define LOOK_NS ((int64_t)20000000)

enum { BARRIER = 1, ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST };
enum { FLOAT32, FLOAT64, INT32, INT64, BFLOAT16, FLOAT16 };

/* What one rank advances and others wait for. */
typedef struct {
    _Atomic uint64_t value;
    _Atomic uint32_t sleepers;
} Counter;

typedef struct {
    _Alignas(LINE) Counter arrived;
    uint64_t task[2]; /* operation and bytes of this step and the one before */
} Control;

typedef struct {
    uint64_t message_bytes;
    uint32_t offset, bytes;
} Piece;

typedef struct {
    _Alignas(LINE) Counter sent;
    _Alignas(LINE) Counter taken;
    _Alignas(LINE) Piece pieces[PIECES];
} Mailbox;

typedef int (*IsGone)(int peer);

typedef struct {
    char *base;
    size_t bytes;
    int size, index;
    int64_t timeout_ns;
    IsGone is_gone;
    uint64_t step;
    size_t *write_offset; /* of each mailbox that this rank writes to */
} Group;

static size_t control_bytes(int size) { return HEADER + (size_t)size * sizeof(Control); }
static size_t slots_at(int size) { return (control_bytes(size) + 4095) / 4096 * 4096; }
static size_t mailboxes_at(int size) { return slots_at(size) + (size_t)size * 2 * SLOT_BYTES; }
static size_t rings_at(int size) {
    return (mailboxes_at(size) + (size_t)size * size * sizeof(Mailbox) + 4095) / 4096 * 4096;
}

size_t segment_bytes(int size) { return rings_at(size) + (size_t)size * size * RING_BYTES; }

static Control *control(const Group *group, int rank) { return (Control *)(group->base + HEADER) + rank; }
static char *slot(const Group *group, int rank) {
    return group->base + slots_at(group->size) + ((size_t)rank * 2 + (group->step & 1)) * SLOT_BYTES;
}
static Mailbox *mailbox(const Group *group, int from, int to) {
    return (Mailbox *)(group->base + mailboxes_at(group->size)) + from * group->size + to;
}
static char *ring(const Group *group, int from, int to) {
    return group->base + rings_at(group->size) + ((size_t)from * group->size + to) * RING_BYTES;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* futex(2) compares 32 bits: the lower ones, which change with every step. */
static uint32_t *futex_word(Counter *counter) {
    return (uint32_t *)&counter->value + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
}

static inline uint64_t reached(Counter *counter) {
    return atomic_load_explicit(&counter->value, memory_order_acquire);
}

/* Sequentially consistent, as is what a waiter does before it sleeps: either sees the other. */
static inline void advance(Counter *counter, uint64_t value) {
    atomic_store(&counter->value, value);
    if (atomic_load(&counter->sleepers)) syscall(SYS_futex, futex_word(counter), FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

/* Sleep until the counter advances or it is time to look whether `peer` still lives. */
static void sleep_before(Counter *counter, uint64_t least) {
    atomic_fetch_add(&counter->sleepers, 1);
    uint64_t value = atomic_load(&counter->value);
    if (value < least)
        syscall(SYS_futex, futex_word(counter), FUTEX_WAIT, (uint32_t)value, &(struct timespec){0, LOOK_NS}, NULL, 0);
    atomic_fetch_sub(&counter->sleepers, 1);
}

static int wait_long(const Group *group, Counter *counter, uint64_t least, int peer) {
    int64_t began = now_ns(), now = began, look = began + LOOK_NS;
    for (;;) {
        if (now - began < YIELD_NS)
            for (int turn = 0; turn < 16 && reached(counter) < least; turn++) sched_yield();
        else
            sleep_before(counter, least);
        if (reached(counter) >= least) return 0;
        if ((now = now_ns()) < look) continue;
        look = now + LOOK_NS;
        int gone = group->is_gone(peer);
        if (reached(counter) >= least) return 0; /* it was its last deed */
        if (gone) return -1 - peer;
        if (now - began > group->timeout_ns) return 1 + peer;
    }
}

/* Wait until the counter reaches `least`. `peer` is the rank that advances it. */
static inline int wait_for(const Group *group, Counter *counter, uint64_t least, int peer) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (reached(counter) >= least) return 0;
        relax();
    }
    return wait_long(group, counter, least, peer);
}

/* Begin the next step: from here on its buffers may be written. */
static int enter(Group *group) {
    uint64_t step = ++group->step;
    for (int rank = 0; rank < group->size; rank++) {
        int code = wait_for(group, &control(group, rank)->arrived, step - 1, rank);
        if (code) return code;
    }
    return 0;
}

/* Publish what this rank wrote in this step. */
static void arrive(Group *group, uint64_t task) {
    Control *own = control(group, group->index);
    own->task[group->step & 1] = task;
    advance(&own->arrived, group->step);
}

static int wait_rank(Group *group, int rank, uint64_t task) {
    Control *other = control(group, rank);
    int code = wait_for(group, &other->arrived, group->step, rank);
    if (code) return code;
    return other->task[group->step & 1] == task ? 0 : MISMATCH + rank;
}

static int wait_all(Group *group, uint64_t task) {
    for (int rank = 0; rank < group->size; rank++) {
        int code = wait_rank(group, rank, task);
        if (code) return code;
    }
    return 0;
}

static uint64_t task_of(int operation, uint64_t bytes) { return (uint64_t)operation << 56 | bytes; }

static inline float from_bfloat16(uint16_t value) {
    union { uint32_t bits; float number; } wide = {(uint32_t)value << 16};
    return wide.number;
}

static inline uint16_t to_bfloat16(float value) { /* to the nearest, ties to even; a NaN stays one */
    union { float number; uint32_t bits; } wide = {value};
    uint32_t rounded = (wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16;
    uint32_t quiet = wide.bits >> 16 | 0x40;
    return (uint16_t)((wide.bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

#ifdef __FLT16_MANT_DIG__
typedef _Float16 Half;
#define FROM_FLOAT16 (float)
#define TO_FLOAT16(value) ((_Float16)(value))
#else /* gcc before version 12, that of many clusters, has no such type on x86-64 */
typedef uint16_t Half;
#define FROM_FLOAT16 from_float16
#define TO_FLOAT16 to_float16

typedef union { float number; uint32_t bits; } Wide;

static inline float from_float16(uint16_t value) {
    const Wide least_normal = {.bits = 113u << 23}; /* 2^-14 */
    Wide wide = {.bits = (uint32_t)(value & 0x7fff) << 13};
    const uint32_t exponent = wide.bits & (0x7c00u << 13);
    wide.bits += (127u - 15) << 23;
    if (exponent == 0x7c00u << 13) { /* infinity or NaN */
        wide.bits += (128u - 16) << 23;
    } else if (exponent == 0) { /* zero or denormal */
        wide.bits += 1u << 23;
        wide.number -= least_normal.number;
    }
    wide.bits |= (uint32_t)(value & 0x8000) << 16;
    return wide.number;
}

static inline uint16_t to_float16(float value) { /* to the nearest, ties to even; a NaN stays one */
    const Wide magic = {.bits = (127u - 15 + 23 - 10 + 1) << 23}; /* its last bit is that of a denormal float16 */
    Wide wide = {value};
    const uint32_t sign = wide.bits & 0x80000000u;
    uint32_t half;
    wide.bits ^= sign;
    if (wide.bits >= (127u + 16) << 23) {
        half = wide.bits > 0x7f800000u ? 0x7e00 : 0x7c00;
    } else if (wide.bits < 113u << 23) {
        wide.number += magic.number;
        half = wide.bits - magic.bits;
    } else {
        half = (wide.bits - ((127u - 15) << 23) + 0xfff + (wide.bits >> 13 & 1)) >> 13;
    }
    return (uint16_t)(half | sign >> 16);
}
#endif

#define SAME(value) (value)

/* The target may be one of the sources, which must be declared (ivdep) for vectorisation. Two ranks,
   the most common number, need no intermediate array of sums. */
#define EACH(count) _Pragma("GCC ivdep") for (size_t i = 0; i < (count); i++)
#define SUM(name, number, wide, widen, narrow)                                                    \
    static void name(void *target, char *const *sources, int size, size_t count) {                 \
        if (size == 2) {                                                                           \
            const number *one = (const number *)sources[0], *two = (const number *)sources[1];     \
            number *to = (number *)target;                                                         \
            EACH(count) to[i] = narrow(widen(one[i]) + widen(two[i]));                             \
            return;                                                                                \
        }                                                                                          \
        wide sums[BLOCK];                                                                          \
        for (size_t from = 0; from < count; from += BLOCK) {                                       \
            size_t many = count - from < BLOCK ? count - from : BLOCK;                             \
            const number *source = (const number *)sources[0] + from;                              \
            EACH(many) sums[i] = widen(source[i]);                                                 \
            for (int rank = 1; rank < size; rank++) {                                              \
                source = (const number *)sources[rank] + from;                                     \
                EACH(many) sums[i] += widen(source[i]);                                            \
            }                                                                                      \
            number *to = (number *)target + from;                                                  \
            EACH(many) to[i] = narrow(sums[i]);                                                    \
        }                                                                                          \
    }

SUM(sum_float32, float, float, SAME, SAME)
SUM(sum_float64, double, double, SAME, SAME)
SUM(sum_int32, uint32_t, uint32_t, SAME, SAME) /* unsigned: an overflow wraps, as in torch */
SUM(sum_int64, uint64_t, uint64_t, SAME, SAME)
SUM(sum_bfloat16, uint16_t, float, from_bfloat16, to_bfloat16)
SUM(sum_float16, Half, float, FROM_FLOAT16, TO_FLOAT16)

static void sum(int dtype, void *target, char *const *sources, int size, size_t count) {
    switch (dtype) {
    case FLOAT32: sum_float32(target, sources, size, count); break;
    case FLOAT64: sum_float64(target, sources, size, count); break;
    case INT32: sum_int32(target, sources, size, count); break;
    case INT64: sum_int64(target, sources, size, count); break;
    case BFLOAT16: sum_bfloat16(target, sources, size, count); break;
    default: sum_float16(target, sources, size, count);
    }
}

static size_t bytes_of(int dtype) {
    static const size_t bytes[] = {4, 8, 4, 8, 2, 2};
    return bytes[dtype];
}

static size_t least_of(size_t a, size_t b) { return a < b ? a : b; }

/* Every rank provides all its values, and sums all. */
static int reduce_in_one_step(Group *group, char *data, size_t count, int dtype, uint64_t task) {
    size_t bytes = count * bytes_of(dtype);
    char *sources[group->size];
    int code = enter(group);
    if (code) return code;
    memcpy(slot(group, group->index), data, bytes);
    arrive(group, task);
    if ((code = wait_all(group, task))) return code;
    for (int rank = 0; rank < group->size; rank++) sources[rank] = slot(group, rank);
    sources[group->index] = data;
    sum(dtype, data, sources, group->size, count);
    return 0;
}

/* Every rank sums a share of the values, then reads the other shares. */
static int reduce_in_two_steps(Group *group, char *data, size_t count, int dtype, uint64_t task) {
    size_t width = bytes_of(dtype), share = (count + group->size - 1) / group->size;
    size_t first = least_of(count, share * group->index), last = least_of(count, first + share);
    char *sources[group->size];
    int code = enter(group);
    if (code) return code;
    char *own = slot(group, group->index);
    memcpy(own, data, first * width);
    memcpy(own + last * width, data + last * width, (count - last) * width);
    arrive(group, task);
    if ((code = wait_all(group, task))) return code;
    for (int rank = 0; rank < group->size; rank++) sources[rank] = slot(group, rank) + first * width;
    sources[group->index] = data + first * width;

    if ((code = enter(group))) return code;
    own = slot(group, group->index);
    sum(dtype, own, sources, group->size, last - first);
    arrive(group, task);
    memcpy(data + first * width, own, (last - first) * width);
    for (int turn = 1; turn < group->size; turn++) { /* the next rank first: not all ranks read the same one */
        int rank = (group->index + turn) % group->size;
        if ((code = wait_rank(group, rank, task))) return code;
        size_t begin = least_of(count, share * rank), end = least_of(count, begin + share);
        memcpy(data + begin * width, slot(group, rank), (end - begin) * width);
    }
    return 0;
}

int all_reduce(Group *group, char *data, size_t count, int dtype) {
    size_t width = bytes_of(dtype), most = SLOT_BYTES / width;
    uint64_t task = task_of(ALL_REDUCE, count * width);
    if (count * width * (size_t)group->size <= 2 * ONE_STEP_BYTES)
        return reduce_in_one_step(group, data, count, dtype, task);
    for (size_t from = 0; from < count; from += most) {
        size_t many = least_of(count - from, most);
        int code = reduce_in_two_steps(group, data + from * width, many, dtype, task);
        if (code) return code;
    }
    return 0;
}

int all_gather(Group *group, const char *part, char *whole, size_t bytes) {
    uint64_t task = task_of(ALL_GATHER, bytes);
    for (size_t from = 0; from < bytes; from += SLOT_BYTES) {
        size_t many = least_of(bytes - from, SLOT_BYTES);
        int code = enter(group);
        if (code) return code;
        memcpy(slot(group, group->index), part + from, many);
        arrive(group, task);
        memcpy(whole + group->index * bytes + from, part + from, many);
        for (int turn = 1; turn < group->size; turn++) {
            int rank = (group->index + turn) % group->size;
            if ((code = wait_rank(group, rank, task))) return code;
            memcpy(whole + rank * bytes + from, slot(group, rank), many);
        }
    }
    return 0;
}

/* `whole` holds `size` parts of `count` numbers; part i summed over all ranks goes to rank i. */
int reduce_scatter(Group *group, const char *whole, char *part, size_t count, int dtype) {
    size_t width = bytes_of(dtype), most = SLOT_BYTES / width / group->size;
    uint64_t task = task_of(REDUCE_SCATTER, count * width);
    char *sources[group->size];
    for (size_t from = 0; from < count; from += most) {
        size_t many = least_of(count - from, most);
        int code = enter(group);
        if (code) return code;
        char *own = slot(group, group->index);
        for (int rank = 0; rank < group->size; rank++)
            if (rank != group->index)
                memcpy(own + rank * many * width, whole + (rank * count + from) * width, many * width);
        arrive(group, task);
        if ((code = wait_all(group, task))) return code;
        for (int rank = 0; rank < group->size; rank++)
            sources[rank] = slot(group, rank) + group->index * many * width;
        sources[group->index] = (char *)(uintptr_t)whole + (group->index * count + from) * width;
        sum(dtype, part + from * width, sources, group->size, many);
    }
    return 0;
}

int broadcast(Group *group, char *data, size_t bytes, int source) {
    uint64_t task = task_of(BROADCAST, bytes);
    for (size_t from = 0; from < bytes; from += SLOT_BYTES) {
        size_t many = least_of(bytes - from, SLOT_BYTES);
        int code = enter(group);
        if (code) return code;
        if (group->index == source) memcpy(slot(group, source), data + from, many);
        arrive(group, task);
        if (group->index == source) continue;
        if ((code = wait_rank(group, source, task))) return code;
        memcpy(data + from, slot(group, source), many);
    }
    return 0;
}

int barrier(Group *group) {
    int code = enter(group);
    if (code) return code;
    arrive(group, task_of(BARRIER, 0));
    return wait_all(group, task_of(BARRIER, 0));
}

/* Offset where `bytes` may be written contiguously, or RING_BYTES if there is no room yet. An empty ring restarts at 0,
   so that messages received in time always use the same, cached memory. */
static size_t room(const Group *group, int to, const Mailbox *box, size_t bytes, uint64_t sent, uint64_t taken) {
    size_t at = group->write_offset[to];
    if (sent == taken) return 0;
    if (sent - taken == PIECES) return RING_BYTES;
    size_t oldest = box->pieces[taken % PIECES].offset;
    if (at > oldest) {
        if (at + bytes <= RING_BYTES) return at;
        at = 0;
    }
    return at + bytes <= oldest && at != oldest ? at : RING_BYTES;
}

/* Returns when `data` may be reused, immediately unless the mailbox is full. */
int send_message(Group *group, const char *data, size_t bytes, int to) {
    Mailbox *box = mailbox(group, group->index, to);
    uint64_t sent = reached(&box->sent);
    for (size_t from = 0; from < bytes || from == 0; from += PIECE_BYTES, sent++) {
        size_t many = least_of(bytes - from, PIECE_BYTES), at;
        size_t taking = many ? (many + LINE - 1) / LINE * LINE : LINE; /* never nothing: the ring's ends would meet */
        for (;;) {
            uint64_t taken = reached(&box->taken);
            if ((at = room(group, to, box, taking, sent, taken)) < RING_BYTES) break;
            int code = wait_for(group, &box->taken, taken + 1, to);
            if (code) return code;
        }
        memcpy(ring(group, group->index, to) + at, data + from, many);
        box->pieces[sent % PIECES] = (Piece){bytes, (uint32_t)at, (uint32_t)many};
        group->write_offset[to] = at + taking;
        advance(&box->sent, sent + 1);
    }
    return 0;
}

int receive_message(Group *group, char *data, size_t bytes, int from_rank) {
    Mailbox *box = mailbox(group, from_rank, group->index);
    uint64_t taken = reached(&box->taken);
    for (size_t from = 0; from < bytes || from == 0; from += PIECE_BYTES, taken++) {
        int code = wait_for(group, &box->sent, taken + 1, from_rank);
        if (code) return code;
        Piece piece = box->pieces[taken % PIECES];
        if (piece.message_bytes != bytes) return MISMATCH + from_rank;
        memcpy(data + from, ring(group, from_rank, group->index) + piece.offset, piece.bytes);
        advance(&box->taken, taken + 1);
    }
    return 0;
}

/* A rank's view of the segment behind the file descriptor, which may be closed then; NULL if it cannot be mapped. */
Group *open_group(int descriptor, int size, int index, int64_t timeout_ns, IsGone is_gone) {
    size_t bytes = segment_bytes(size);
    char *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    if (base == MAP_FAILED) return NULL;
    Group *group = calloc(1, sizeof(Group));
    size_t *offsets = calloc((size_t)size, sizeof(size_t));
    if (!group || !offsets) {
        free(group);
        free(offsets);
        munmap(base, bytes);
        return NULL;
    }
    *group = (Group){base, bytes, size, index, timeout_ns, is_gone, 0, offsets};
    /* Of the memory of this rank's node, and no page fault in the first sums. */
    memset(base + slots_at(size) + (size_t)index * 2 * SLOT_BYTES, 0, 2 * SLOT_BYTES);
    return group;
}

void close_group(Group *group) {
    munmap(group->base, group->bytes);
    free(group->write_offset);
    free(group);
}
