/* What every call goes through: counting, the script's errors and sleeps, a connection that lives. Not NVIDIA's code.
 *
 * One lock over everything; it is let go while a call sleeps, hangs, or calls back. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "clients.h"
#include "world.h"

enum { TOLD = 96, MESSAGE = 128 };
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct { char name[64]; unsigned long n; } calls[TOLD];
bool initialised;

void lock(void) { pthread_mutex_lock(&mutex); }
void unlock(void) { pthread_mutex_unlock(&mutex); }

void count_call(const char *name) {
    for (int i = 0; i < TOLD; i++) {
        if (!*calls[i].name) snprintf(calls[i].name, sizeof calls[i].name, "%s", name);
        if (!strcmp(calls[i].name, name)) { calls[i].n++; return; }
    }
}

unsigned long dcgmStubCalls(const char *name) {
    unsigned long n = 0;
    lock();
    for (int i = 0; i < TOLD; i++)
        if (!strcmp(calls[i].name, name)) n = calls[i].n;
    unlock();
    return n;
}

void wait_ms(long ms) {
    struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    unlock();
    nanosleep(&pause, NULL);
    lock();
    world_now();
}

bool hang(void) {
    for (long ms = 0; world.hung && ms < world.hung_ms; ms++) wait_ms(1);
    return world.hung;
}

static long match(const struct rule *rules, unsigned n, const char *call, int gpu) {
    for (unsigned i = n; i-- > 0;)
        if (!strcmp(rules[i].call, call) && (rules[i].gpu == -1 || rules[i].gpu == gpu)) return rules[i].value;
    return 0;
}

status_t verdict(const char *call, int gpu) {
    long ms = match(world.sleep, world.sleeps, call, gpu);
    if (ms) wait_ms(ms);
    return (status_t)match(world.error, world.errors, call, gpu);
}

/* Fails with the lock let go, goes on with it held. */
status_t enter(const char *call, handle_t handle) {
    status_t status = OK;
    lock();
    world_now();
    count_call(call);
    bool ours = handle == EMBEDDED_HANDLE;
    if (!initialised || (ours && !embedded_runs())) status = UNINITIALIZED;
    else if (!handle) status = BADPARAM;
    else if (!ours && client_alive(handle) && hang()) status = TIMEOUT;
    if (!status) status = verdict(call, -1);
    if (!status && !client_alive(handle)) status = CONNECTION_NOT_VALID;
    return status ? leave(status) : OK;
}

unsigned long requests;

/* In life the engine is another process: with DCGM_STUB_ROUND_TRIPS set, a process of ours stands for it and sends each
 * message back. It ends when its end of the socket is the last one open. */
static int other_process(void) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) die("no socket for round trips", "");
    pid_t child = fork();
    if (child < 0) die("no process for round trips", "");
    if (child) return close(pair[1]), pair[0];
    char message[MESSAGE];
    for (int fd = 0; fd < 1024; fd++)
        if (fd != pair[1]) close(fd);
    while (recv(pair[1], message, sizeof message, MSG_WAITALL) == sizeof message)
        if (send(pair[1], message, sizeof message, MSG_NOSIGNAL) < 0) break;
    _exit(0);
}

void request(void) {
    static int to = -2;
    requests++;
    if (to == -2) to = getenv("DCGM_STUB_ROUND_TRIPS") ? other_process() : -1;
    char message[MESSAGE] = {0};
    if (to < 0) return;
    if (send(to, message, sizeof message, MSG_NOSIGNAL) < 0 || recv(to, message, sizeof message, MSG_WAITALL) < 0)
        die("the process for round trips is gone", "");
}

status_t leave(status_t status) {
    unlock();
    return status;
}
