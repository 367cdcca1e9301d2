"""The text of the library that every model needs: a team of threads that runs steps in turn, and steps without weights.

A block of steps is run by the thread that asks for it, and by one thread for each further core, pinned to it. Those
come when they are awake, at the next step: nobody waits for them; so a block takes in more cores while it runs.
"""

from __future__ import annotations

from cotenant.compile.ckernel.moves import MOVES
from cotenant.compile.ckernel.text import EXP, head
from cotenant.compile.target import Target


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
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
"""

_BLOCKS = """\
#define CORES 1024
#define MOST 256
#define SPINS 4000
#define OVER (-1L)
#if defined(__x86_64__)
#define RELAX __builtin_ia32_pause()
#else
#define RELAX atomic_signal_fence(memory_order_seq_cst)
#endif
typedef struct {
  const step *steps;
  _Atomic long turn;          /* number of the step that runs from 1 on, times CORES, plus how many run it; OVER */
  char far0[64];
  _Atomic long done;          /* how many of them have done their part, the one that asked left out */
  char far1[64];
  _Atomic long joined, left;  /* threads that came, and that went */
  _Atomic long lock, open;
  long called;
  int who[MOST];
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

static void take_part(block *b) {
  long seen = atomic_load(&b->turn);
  const long rank = atomic_fetch_add(&b->joined, 1) + 1;
  for (long n = 0;;) {
    const long turn = atomic_load_explicit(&b->turn, memory_order_acquire);
    if (turn == OVER) break;
    if (turn == seen && turn % CORES <= rank) { wait_a_bit(n++); continue; }
    if (turn % CORES <= rank) { seen = turn; continue; }
    n = 0;
    const step *s = b->steps + turn / CORES - 1;
    s->run(s, rank, turn % CORES);
    atomic_fetch_add_explicit(&b->done, 1, memory_order_release);
    while (atomic_load_explicit(&b->turn, memory_order_acquire) == turn) wait_a_bit(n++);
    n = 0;
    seen = 0;
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
    b->who[b->called++] = cores[i];
    atomic_fetch_add(&h->word, 1);
    syscall(SYS_futex, &h->word, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0);
  }
  unlock(b);
  return open;
}

long block_size(void) { return sizeof(block); }

/* Run steps in turn on the calling thread and on those of other cores, each of which joins when it is there. With
   `wait` the first step begins when all have come. Gives the most that ran a step. */
long run_block(block *b, const step *steps, long count, const int *cores, long others, long wait) {
  long most = 1;
  b->steps = steps;
  atomic_store(&b->turn, 0);
  atomic_store(&b->done, 0);
  atomic_store(&b->joined, 0);
  atomic_store(&b->left, 0);
  b->called = 0;
  atomic_store(&b->open, 1);
  if (others) call_cores(b, cores, others);
  for (long n = 0; wait && atomic_load(&b->joined) < b->called; n++) wait_a_bit(n);
  for (long i = 0; i < count; i++) {
    const long parts = 1 + atomic_load_explicit(&b->joined, memory_order_acquire);
    if (parts > most) most = parts;
    if (parts > 1) {
      atomic_store_explicit(&b->done, 0, memory_order_relaxed);
      atomic_store_explicit(&b->turn, (i + 1) * CORES + parts, memory_order_release);
    }
    steps[i].run(steps + i, 0, parts);
    for (long n = 0; atomic_load_explicit(&b->done, memory_order_acquire) < parts - 1; n++) wait_a_bit(n);
  }
  lock(b);
  atomic_store(&b->open, 0);
  unlock(b);
  atomic_store_explicit(&b->turn, OVER, memory_order_release);
  long came = 0;
  for (long i = 0; i < b->called; i++) {
    block *mine = b;
    if (!atomic_compare_exchange_strong(&helpers[b->who[i]].job, &mine, (block *)0)) came++;
  }
  for (long n = 0; atomic_load(&b->left) < came; n++) wait_a_bit(n);
  return most;
}

static long now(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * 1000000000L + t.tv_nsec;
}

/* CPU time in ns of each of these steps, alone on the calling thread, `repeats` times in turn. */
void time_steps(const step *steps, long count, long repeats, long *ns) {
  for (long i = 0; i < count; i++) {
    const long began = now(CLOCK_THREAD_CPUTIME_ID);
    for (long k = 0; k < repeats; k++) steps[i].run(steps + i, 0, 1);
    ns[i] = (now(CLOCK_THREAD_CPUTIME_ID) - began) / repeats;
  }
}
"""
