"""C code of the runtime library: a team of threads that runs steps, and steps without weights.

The calling thread runs a block of steps, with one pinned thread for each further core. Those join at the next step once
they run, and no thread waits for them: so a block can expand while it runs. Every step is divided into one share per
thread, and shares into chunks: an idle thread takes chunks of slower threads (work stealing).
"""

from __future__ import annotations

from cotenant.techniques.layer_blocks.compile.ckernel.moves import MOVES
from cotenant.techniques.layer_blocks.compile.ckernel.prelude import EXP, head
from cotenant.techniques.layer_blocks.compile.target import Target


def source(target: Target) -> str:
    """The text of the library."""
    return _INCLUDES + head(target) + EXP + MOVES + _BLOCKS


_INCLUDES = """\
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
"""

_BLOCKS = """\
#define CORES 1024
#define MOST 256
#define SPINS 4000
#define CHUNKS 4
#define OVER (-1L)
#if defined(__x86_64__)
#define RELAX __builtin_ia32_pause()
#else
#define RELAX atomic_signal_fence(memory_order_seq_cst)
#endif
typedef struct { _Atomic long taken; char far[120]; } share;
typedef struct {
  const step *now;            /* the step that runs */
  _Atomic long turn;          /* counts steps from block to block, times CORES, plus the shares it has; or OVER */
  char far0[112];
  _Atomic long done;          /* chunks of it that are done */
  char far1[120];
  _Atomic long joined, left;  /* threads that came, and that went */
  _Atomic long lock, open;
  long count, called, came;
  int cores[MOST];
  share shares[MOST + 1];     /* which chunk of each share is next, with the count of the step above it */
} block;
typedef struct {
  _Atomic int word;           /* what its thread sleeps on */
  _Atomic int state;          /* 0 no thread, 1 being started, 2 there */
  _Atomic(block *) job;
  char far[48];
} helper;
static helper helpers[CORES];

static void lock(block *b) { while (atomic_exchange(&b->lock, 1)) RELAX; }
static void unlock(block *b) { atomic_store(&b->lock, 0); }
static void wait_a_bit(long n) { if (n < SPINS) RELAX; else sched_yield(); }

/* Run chunks of a step: those of the thread's own share, then those that others have not begun. */
static void work(block *b, long turn, long rank) {
  const long parts = turn % CORES, count = turn / CORES;
  for (long k = 0; k < parts; k++) {
    const long at = (rank + k) % parts;
    _Atomic long *taken = &b->shares[at].taken;
    long seen = atomic_load(taken);
    while (seen / CORES == count && seen % CORES < CHUNKS) {
      if (!atomic_compare_exchange_weak(taken, &seen, seen + 1)) continue;
      const step *s = b->now;
      s->run(s, at * CHUNKS + seen % CORES, parts * CHUNKS);
      atomic_fetch_add_explicit(&b->done, 1, memory_order_release);
      seen = atomic_load(taken);
    }
  }
}

static void take_part(block *b) {
  const long rank = atomic_fetch_add(&b->joined, 1) + 1;
  long seen = 0;
  for (long n = 0;;) {
    const long turn = atomic_load_explicit(&b->turn, memory_order_acquire);
    if (turn == OVER) break;
    if (turn == seen) { wait_a_bit(n++); continue; }
    work(b, turn, rank);
    seen = turn;
    n = 0;
  }
  atomic_fetch_add(&b->left, 1);
}

static void *live(void *given) {
  helper *h = given;
  const int core = (int)(h - helpers);
  sigset_t every;
  sigfillset(&every);
  pthread_sigmask(SIG_SETMASK, &every, 0);
  cpu_set_t *set = CPU_ALLOC(CORES);
  CPU_ZERO_S(CPU_ALLOC_SIZE(CORES), set);
  CPU_SET_S(core, CPU_ALLOC_SIZE(CORES), set);
  sched_setaffinity(0, CPU_ALLOC_SIZE(CORES), set);  /* a core that is not there: it stays unpinned */
  CPU_FREE(set);
  for (;;) {
    const int word = atomic_load(&h->word);
    block *b = atomic_exchange(&h->job, (block *)0);
    if (b) take_part(b);
    else syscall(SYS_futex, &h->word, FUTEX_WAIT_PRIVATE, word, 0, 0, 0);
  }
  return 0;
}

/* Ask the threads of these cores to join a block that runs; 0 when it has ended. */
long call_cores(block *b, const int *cores, long count) {
  lock(b);
  const long open = atomic_load(&b->open);
  for (long i = 0; open && i < count; i++) {
    if (cores[i] < 0 || cores[i] >= CORES || b->called >= MOST) continue;
    helper *h = helpers + cores[i];
    int none = 0;
    if (atomic_compare_exchange_strong(&h->state, &none, 1)) {
      pthread_attr_t how;
      pthread_t thread;
      pthread_attr_init(&how);
      pthread_attr_setdetachstate(&how, PTHREAD_CREATE_DETACHED);
      atomic_store(&h->state, pthread_create(&thread, &how, live, h) ? 0 : 2);
      pthread_attr_destroy(&how);
    }
    block *free = 0;
    if (!atomic_compare_exchange_strong(&h->job, &free, b)) continue;  /* another block waits for it */
    b->cores[b->called++] = cores[i];
    atomic_fetch_add(&h->word, 1);
    syscall(SYS_futex, &h->word, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0);
  }
  unlock(b);
  return open;
}

/* A block is never freed: a thread may look at it once more after its last step. */
block *new_block(void) {
  void *made = 0;
  if (posix_memalign(&made, 128, sizeof(block))) return 0;
  memset(made, 0, sizeof(block));
  return made;
}

/* From here on cores can be called to a block. Those of the last time have to be gone. */
void open_block(block *b) {
  for (long n = 0; atomic_load(&b->left) < b->came; n++) wait_a_bit(n);
  atomic_store(&b->joined, 0);
  atomic_store(&b->left, 0);
  atomic_store(&b->turn, 0);
  b->called = b->came = 0;
  atomic_store(&b->open, 1);
}

/* The first step that has no function, input or output; `count` where all have them. */
static long first_unready(const step *steps, long count) {
  long i = 0;
  while (i < count && steps[i].run && steps[i].p[0] && steps[i].p[4]) i++;
  return i;
}

/* Run steps in turn on the calling thread and on those of other cores, each of which joins when it is there. With
   `wait` the first step begins when all have come. Gives the most that shared a step; -1 - i, and runs nothing, where
   step i is not ready. */
long run_block(block *b, const step *steps, long count, const int *cores, long others, long wait) {
  const long ready = first_unready(steps, count), refused = ready < count ? -1 - ready : 0;
  long most = 1;
  if (refused) count = 0;
  if (!atomic_load(&b->open)) open_block(b);
  if (others) call_cores(b, cores, others);
  for (long n = 0; wait && atomic_load(&b->joined) < b->called; n++) wait_a_bit(n);
  for (long i = 0; i < count; i++) {
    const long parts = 1 + atomic_load_explicit(&b->joined, memory_order_acquire);
    if (parts == 1) {
      steps[i].run(steps + i, 0, 1);
      continue;
    }
    if (parts > most) most = parts;
    b->count++;
    b->now = steps + i;
    atomic_store(&b->done, 0);
    for (long k = 0; k < parts; k++) atomic_store(&b->shares[k].taken, b->count * CORES);
    atomic_store_explicit(&b->turn, b->count * CORES + parts, memory_order_release);
    work(b, b->count * CORES + parts, 0);
    for (long n = 0; atomic_load_explicit(&b->done, memory_order_acquire) < parts * CHUNKS; n++) wait_a_bit(n);
  }
  lock(b);
  atomic_store(&b->open, 0);
  unlock(b);
  atomic_store_explicit(&b->turn, OVER, memory_order_release);
  for (long i = 0; i < b->called; i++) {
    block *mine = b;
    if (!atomic_compare_exchange_strong(&helpers[b->cores[i]].job, &mine, (block *)0)) b->came++;
  }
  return refused ? refused : most;
}

static long now(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * 1000000000L + t.tv_nsec;
}

/* CPU time in ns of each of these steps, alone on the calling thread, `repeats` times in turn. Gives 0; -1 - i, and
   runs nothing, where step i is not ready. */
long time_steps(const step *steps, long count, long repeats, long *ns) {
  const long ready = first_unready(steps, count);
  if (ready < count) return -1 - ready;
  for (long i = 0; i < count; i++) {
    const long began = now(CLOCK_THREAD_CPUTIME_ID);
    for (long k = 0; k < repeats; k++) steps[i].run(steps + i, 0, 1);
    ns[i] = (now(CLOCK_THREAD_CPUTIME_ID) - began) / repeats;
  }
  return 0;
}
"""
