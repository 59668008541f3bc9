/* What every function of the simulated libnvidia-ml.so.1 does: ask the server, over its socket.
 *
 * A request is one packet of a SOCK_SEQPACKET socket, so it arrives whole or not at all. Its bytes are taken by the
 * kernel from where the arguments point to: a pointer to nowhere is INVALID_ARGUMENT, and no crash. docs/c-face.md
 * describes the packets. Connections are kept in a pool, one for each call that is under way at the same time; they
 * stay open until the process ends, which is how the server knows that it has ended.
 *
 * shim.py puts nvml.h and a table `versions` before this text, and a function for each symbol behind it.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { PROTOCOL = 1, PACKET_MAX = 65536, ARRAY_MAX = 49152, ARGUMENTS_MAX = 8 };
enum { SUCCESS = 0, INVALID = 2, NOT_LOADED = 9, TIMED_OUT = 10, MISMATCH = 18, UNKNOWN = 999 };
enum { PATIENCE_MS = 3000, PAUSE_MS = 20 };

struct migd_argument {
    uint64_t value;
    uint32_t size; /* of what is sent of the place it points to */
    uint32_t pad;
};

struct request {
    uint8_t kind; /* 'C' */
    uint8_t count;
    uint16_t name_size;
    uint32_t again; /* 1: sent before, on a connection that broke without an answer */
    uint64_t number;
};

struct reply {
    int32_t code;
    uint32_t pad;
    uint64_t number; /* then, again and again: argument, size, bytes */
};

struct hello {
    uint8_t kind; /* 'H' */
    uint8_t protocol;
    uint16_t stated; /* 1: who this is was said by migd_sim_be, which only servers of tests believe */
    int32_t pid;
    uint64_t token; /* of this process, or of this copy of the library */
    uint64_t next;  /* the number of the next request: earlier ones were for a server before this one */
    char privilege[16];
};

struct link {
    int fd;
    struct link *idle; /* the next idle one */
    struct link *all;  /* the next one of all */
    unsigned char reply[PACKET_MAX];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct link *idle, *all;
static pid_t owner;
static uint64_t token, next_number = 1;
static int served; /* a server was reached, and has not been waited for in vain since */
static struct hello who;
static char stated_path[PATH_MAX];

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void pause_ms(int64_t ms)
{
    struct timespec rest = {ms / 1000, (ms % 1000) * 1000000};
    while (nanosleep(&rest, &rest) != 0 && errno == EINTR) {
    }
}

/* ---- one process, and what its children inherit of it */

/* Under the lock. In a child, what its parent had open is closed: the parent's end must not wait for the child's. */
static void begin_process(void)
{
    struct link *link;
    idle = NULL;
    for (link = all; link != NULL; link = link->all) {
        if (link->fd >= 0)
            close(link->fd);
        link->fd = -1;
        link->idle = idle;
        idle = link;
    }
    owner = getpid();
    if (getrandom(&token, sizeof token, GRND_NONBLOCK) != (ssize_t)sizeof token) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        token = ((uint64_t)now.tv_nsec << 32) ^ (uint64_t)now.tv_sec ^ ((uint64_t)owner << 40) ^ (uintptr_t)&token;
    }
    next_number = 1;
    served = 0;
}

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void after_fork(void)
{
    pthread_mutex_unlock(&lock);
}

static void in_child(void)
{
    pthread_mutex_init(&lock, NULL);
    if (owner != 0)
        begin_process();
}

__attribute__((constructor)) static void loaded(void)
{
    pthread_atfork(before_fork, after_fork, in_child);
}

static struct link *take(uint64_t *number)
{
    struct link *link;
    pthread_mutex_lock(&lock);
    if (owner != getpid())
        begin_process();
    *number = next_number++;
    link = idle;
    if (link != NULL) {
        idle = link->idle;
    } else if ((link = malloc(sizeof *link)) != NULL) {
        link->fd = -1;
        link->all = all;
        all = link;
    }
    pthread_mutex_unlock(&lock);
    return link;
}

static void give(struct link *link)
{
    pthread_mutex_lock(&lock);
    if (owner == getpid()) {
        link->idle = idle;
        idle = link;
    }
    pthread_mutex_unlock(&lock);
}

/* Ask as somebody else, and another server: for tests, which load a copy of this file for each client. */
__attribute__((visibility("default"))) void migd_sim_be(const char *path, int pid, const char *privilege)
{
    pthread_mutex_lock(&lock);
    snprintf(stated_path, sizeof stated_path, "%s", path);
    who.stated = 1;
    who.pid = pid;
    snprintf(who.privilege, sizeof who.privilege, "%s", privilege);
    pthread_mutex_unlock(&lock);
}

/* ---- the server */

/* The socket's path: as stated, $MIGD_SIM_SOCKET, ROOT/run/migd/nvml.sock where this file is ROOT/usr/lib/..., or /run. */
static void find_server(char *path, size_t size)
{
    const char *given = getenv("MIGD_SIM_SOCKET");
    char real[PATH_MAX];
    char *end = NULL, *at;
    Dl_info here;
    if (stated_path[0] != 0) {
        snprintf(path, size, "%s", stated_path);
        return;
    }
    if (given != NULL && given[0] != 0) {
        snprintf(path, size, "%s", given);
        return;
    }
    if (dladdr((void *)find_server, &here) != 0 && realpath(here.dli_fname, real) != NULL)
        for (at = real; (at = strstr(at, "/usr/lib")) != NULL; at++)
            end = at;
    if (end != NULL)
        *end = 0;
    snprintf(path, size, "%s/run/migd/nvml.sock", end != NULL ? real : "");
}

/* A socket address holds 107 characters: a longer path is reached through its folder. */
static int reach(int fd, const char *path)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    int folder = -1, result;
    if (strlen(path) < sizeof to.sun_path) {
        memcpy(to.sun_path, path, strlen(path) + 1);
    } else {
        char copy[PATH_MAX];
        char *slash;
        snprintf(copy, sizeof copy, "%s", path);
        slash = strrchr(copy, '/');
        if (slash == NULL)
            return -1;
        *slash = 0;
        folder = open(copy, O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (folder < 0)
            return -1;
        snprintf(to.sun_path, sizeof to.sun_path, "/proc/self/fd/%d/%.60s", folder, slash + 1);
    }
    do {
        result = connect(fd, (struct sockaddr *)&to, sizeof to);
    } while (result != 0 && errno == EINTR);
    if (result != 0 && errno == EISCONN)
        result = 0;
    if (folder >= 0)
        close(folder);
    return result;
}

static ssize_t receive(int fd, void *buffer, size_t size)
{
    ssize_t got;
    do {
        got = recv(fd, buffer, size, 0);
    } while (got < 0 && errno == EINTR);
    return got;
}

/* Open a connection, if it is not open: 0, or the NVML code that says why not. */
static int open_link(struct link *link)
{
    char path[PATH_MAX];
    struct hello hello = who;
    struct reply answer;
    ssize_t sent;
    int fd;
    if (link->fd >= 0)
        return 0;
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return NOT_LOADED;
    find_server(path, sizeof path);
    if (reach(fd, path) != 0) {
        close(fd);
        return NOT_LOADED;
    }
    hello.kind = 'H';
    hello.protocol = PROTOCOL;
    pthread_mutex_lock(&lock);
    hello.token = token;
    hello.next = next_number;
    pthread_mutex_unlock(&lock);
    do {
        sent = send(fd, &hello, sizeof hello, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    if (sent != (ssize_t)sizeof hello || receive(fd, &answer, sizeof answer) != (ssize_t)sizeof answer) {
        close(fd);
        return NOT_LOADED;
    }
    if (answer.code != SUCCESS) {
        close(fd);
        return MISMATCH;
    }
    pthread_mutex_lock(&lock);
    served = 1;
    pthread_mutex_unlock(&lock);
    link->fd = fd;
    return 0;
}

static void drop_link(struct link *link)
{
    if (link->fd >= 0)
        close(link->fd);
    link->fd = -1;
}

/* ---- one request */

enum outcome { ANSWERED, NOT_SENT, NO_ANSWER, BAD_POINTER };

static enum outcome exchange(struct link *link, const char *name, struct migd_argument *arguments, unsigned count,
                             uint64_t number, uint32_t again, int *code)
{
    struct request request = {'C', (uint8_t)count, (uint16_t)strlen(name), again, number};
    struct iovec parts[3 + ARGUMENTS_MAX] = {
        {&request, sizeof request}, {arguments, count * sizeof *arguments}, {(void *)(uintptr_t)name, request.name_size}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    struct reply answer;
    ssize_t got, at;
    unsigned i;
    for (i = 0; i < count; i++)
        if (arguments[i].size != 0) {
            parts[message.msg_iovlen].iov_base = (void *)(uintptr_t)arguments[i].value;
            parts[message.msg_iovlen++].iov_len = arguments[i].size;
        }
    do {
        got = sendmsg(link->fd, &message, MSG_NOSIGNAL);
    } while (got < 0 && errno == EINTR);
    if (got < 0)
        return errno == EFAULT || errno == EMSGSIZE ? BAD_POINTER : NOT_SENT;
    got = receive(link->fd, link->reply, sizeof link->reply);
    if (got < (ssize_t)sizeof answer)
        return NO_ANSWER;
    memcpy(&answer, link->reply, sizeof answer);
    if (answer.number != number)
        return NO_ANSWER;
    for (at = sizeof answer; at + 8 <= got;) {
        uint32_t place[2]; /* argument, size */
        memcpy(place, link->reply + at, sizeof place);
        at += 8;
        if (place[0] >= count || arguments[place[0]].value == 0 || at + (ssize_t)place[1] > got)
            return NO_ANSWER;
        memcpy((void *)(uintptr_t)arguments[place[0]].value, link->reply + at, place[1]);
        at += place[1];
    }
    *code = answer.code;
    return ANSWERED;
}

/* What the server answers; what it answers after a restart, once; what a driver that is not there would answer.
 *
 * A request that broke off without an answer is sent once more and says so: the server gives the answer that it has,
 * does what it never did, and says UNKNOWN where it cannot tell. wait: the argument that is a timeout in milliseconds
 * (-1: none); such a call waits until then, whether the server is there or not.
 */
static int ask(const char *name, struct migd_argument *arguments, unsigned count, int wait)
{
    int64_t began = now_ms(), until = 0;
    uint64_t timeout = wait >= 0 ? (uint32_t)arguments[wait].value : 0;
    uint64_t number;
    uint32_t again = 0;
    int tries = 0, code = UNKNOWN, patient;
    struct link *link = take(&number);
    if (link == NULL)
        return UNKNOWN;
    pthread_mutex_lock(&lock);
    patient = served;
    pthread_mutex_unlock(&lock);
    for (;;) {
        enum outcome outcome = NOT_SENT;
        int closed = 0;
        if (wait >= 0) {
            int64_t past = now_ms() - began;
            arguments[wait].value = past >= (int64_t)timeout ? 0 : timeout - (uint64_t)past;
        }
        closed = open_link(link);
        if (closed == MISMATCH) {
            code = MISMATCH;
            break;
        }
        if (closed == 0)
            outcome = exchange(link, name, arguments, count, number, again, &code);
        if (outcome == ANSWERED)
            break;
        if (outcome == BAD_POINTER) {
            code = INVALID;
            break;
        }
        drop_link(link);
        if (outcome == NO_ANSWER) {
            if (again && wait < 0) {
                code = UNKNOWN;
                break;
            }
            again = 1;
        }
        if (wait >= 0) {
            if (now_ms() - began >= (int64_t)timeout) {
                code = TIMED_OUT;
                break;
            }
            pause_ms(PAUSE_MS);
        } else if (closed == 0) { /* it was open, and broke: another server may be there already */
            if (++tries > 100) {
                code = again ? UNKNOWN : NOT_LOADED;
                break;
            }
            until = 0;
        } else {
            if (until == 0)
                until = now_ms() + (patient || again ? PATIENCE_MS : 0);
            if (now_ms() >= until) {
                pthread_mutex_lock(&lock);
                served = 0;
                pthread_mutex_unlock(&lock);
                code = again ? UNKNOWN : NOT_LOADED;
                break;
            }
            pause_ms(PAUSE_MS);
        }
    }
    give(link);
    return code;
}

/* ---- arguments, as the generated functions write them */

static uint32_t text_size(const char *text)
{
    size_t size = text == NULL ? 0 : strlen(text) + 1;
    return size > ARRAY_MAX ? ARRAY_MAX : (uint32_t)size;
}

static uint32_t array_size(const void *array, int64_t count, size_t each)
{
    if (array == NULL || count <= 0)
        return 0;
    return (uint64_t)count > ARRAY_MAX / each ? 0 : (uint32_t)((size_t)count * each);
}

/* A structure is as large as its version says; of one that no header knows only the version is sent, to be refused. */
static uint32_t versioned_size(const void *structure)
{
    unsigned version, i;
    if (structure == NULL)
        return 0;
    memcpy(&version, structure, sizeof version);
    for (i = 0; i < sizeof versions / sizeof *versions; i++)
        if (versions[i] == version)
            return version & 0xFFFFFF;
    return sizeof version;
}

#define VALUE(x) {(uint64_t)(uintptr_t)(x), 0, 0}
#define FILLED(x) {(uint64_t)(uintptr_t)(x), 0, 0}
#define POINTED(x) {(uint64_t)(uintptr_t)(x), (x) == NULL ? 0 : (uint32_t)sizeof *(x), 0}
#define TEXT(x) {(uint64_t)(uintptr_t)(x), text_size(x), 0}
#define ARRAY(x, count) {(uint64_t)(uintptr_t)(x), array_size(x, count, sizeof *(x)), 0}
#define VERSIONED(x) {(uint64_t)(uintptr_t)(x), versioned_size(x), 0}
