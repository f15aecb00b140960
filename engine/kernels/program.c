/* Runs a list of calls of other functions in sequence: one call from Python instead of about a hundred.
 *
 * Functions of any prototype are called by one of three types. That is right for the System V calling convention of
 * x86-64 (https://gitlab.com/x86-psABIs/x86-64-ABI, section 3.2.3), which build.py ensures: integers and addresses go
 * in their own sequence of registers, the seventh and further ones on the stack in order, up to eight floats in another
 * sequence; the caller cleans the stack, and unused registers are ignored.
 */
#include <stdint.h>

enum { FEW = 6, SOME = 12, MOST = 24, REALS = 4 };

struct call {
    void (*function)(void);
    int64_t integers[MOST];
    float reals[REALS];
    int64_t integer_count, checked; /* checked: it returns an int, and anything but 0 ends the program */
};

typedef int64_t number;
typedef int (*of_few)(number, number, number, number, number, number, float, float, float, float);
typedef int (*of_some)(number, number, number, number, number, number, number, number, number, number, number, number,
                       float, float, float, float);
typedef int (*of_most)(number, number, number, number, number, number, number, number, number, number, number, number,
                       number, number, number, number, number, number, number, number, number, number, number, number,
                       float, float, float, float);

static int make(const struct call *call) {
    const int64_t *n = call->integers;
    const float *r = call->reals;
    if (call->integer_count <= FEW)
        return ((of_few)call->function)(n[0], n[1], n[2], n[3], n[4], n[5], r[0], r[1], r[2], r[3]);
    if (call->integer_count <= SOME)
        return ((of_some)call->function)(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], r[0],
                                         r[1], r[2], r[3]);
    return ((of_most)call->function)(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12],
                                     n[13], n[14], n[15], n[16], n[17], n[18], n[19], n[20], n[21], n[22], n[23], r[0],
                                     r[1], r[2], r[3]);
}

/* Runs the calls until one fails; returns its number and stores its code in `code`; -1 if none fails. */
int64_t program_run(const struct call *calls, int64_t count, int64_t *code) {
    for (int64_t place = 0; place < count; place++) {
        const int result = make(calls + place);
        if (calls[place].checked && result) {
            *code = result;
            return place;
        }
    }
    return -1;
}
