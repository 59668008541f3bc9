/* What stands for nvidia-smi on simulated GPUs: lists them and resets them, and says that it can do no more.
 *
 * It lists through libnvidia-ml.so.1 as any program does. NVML has no reset, so that is asked of the server, by a
 * control message on its socket. libc only. The texts are as nvidia-smi's where they were seen.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { DONE = 0, FAILED = 1, USAGE = 2, NOT_FOUND = 6, NO_DRIVER = 9 };
enum { PACKET_MAX = 65536, ANSWER_MAX = 1 << 20, IDS_MAX = 256 };

static const char WHAT[] =
    "This is not NVIDIA's nvidia-smi: it stands for it on GPUs that migd simulates, and can only\n"
    "\n"
    "    -L, --list-gpus               list the GPUs and their MIG devices\n"
    "    -r, --gpu-reset [-i ID,...]   reset all GPUs, or these\n"
    "    -i, --id=ID                   UUID, index, or PCI address of a GPU\n"
    "    -h, --help                    print this\n"
    "\n"
    "Neither queries nor the subcommand mig are there: use migd, mig-parted or any program that calls NVML.\n";

static int no_driver(const char *why)
{
    fprintf(stderr,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
            "NVIDIA driver is installed and running.\n(It is migd's simulated one: %s.)\n",
            why);
    return NO_DRIVER;
}

/* The driver root that this program lies in: ROOT of ROOT/usr/bin/nvidia-smi; "" where it lies elsewhere. */
static void find_root(char *root, size_t size)
{
    static const char inside[] = "/usr/bin/nvidia-smi";
    ssize_t got = readlink("/proc/self/exe", root, size - 1);
    size_t length = got < 0 ? 0 : (size_t)got;
    root[length] = 0;
    if (length >= sizeof inside - 1 && strcmp(root + length - (sizeof inside - 1), inside) == 0)
        root[length - (sizeof inside - 1)] = 0;
    else
        root[0] = 0;
}

/* ---- listing, by NVML */

typedef int (*nvml_function)();

static void *library;

static nvml_function named(const char *name)
{
    nvml_function found;
    *(void **)&found = dlsym(library, name);
    return found;
}

/* The library beside this program, else where the loader finds one. */
static int load(void)
{
    static const char *const folders[] = {"x86_64-linux-gnu", "aarch64-linux-gnu"};
    char root[PATH_MAX], path[PATH_MAX + 64];
    size_t i;
    find_root(root, sizeof root);
    for (i = 0; library == NULL && i < sizeof folders / sizeof *folders; i++) {
        snprintf(path, sizeof path, "%s/usr/lib/%s/libnvidia-ml.so.1", root, folders[i]);
        library = dlopen(path, RTLD_NOW);
    }
    if (library == NULL)
        library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    return library != NULL;
}

static int call_failed(const char *what, int code)
{
    const char *(*text)(int);
    *(void **)&text = dlsym(library, "nvmlErrorString");
    fprintf(stderr, "%s: %s\n", what, text != NULL ? text(code) : "unknown error");
    return FAILED;
}

static int list_mig_devices(void *gpu)
{
    unsigned count = 0, i;
    char uuid[96], name[96];
    if (named("nvmlDeviceGetMaxMigDeviceCount")(gpu, &count) != 0)
        return DONE; /* a board without MIG */
    for (i = 0; i < count; i++) {
        void *device;
        const char *profile;
        int code = named("nvmlDeviceGetMigDeviceHandleByIndex")(gpu, i, &device);
        if (code != 0) /* none at this index */
            continue;
        if ((code = named("nvmlDeviceGetUUID")(device, uuid, (unsigned)sizeof uuid)) != 0 ||
            (code = named("nvmlDeviceGetName")(device, name, (unsigned)sizeof name)) != 0)
            return call_failed("a MIG device cannot be read", code);
        profile = strstr(name, " MIG ");
        printf("  MIG %-10s  Device %2u: (UUID: %s)\n", profile != NULL ? profile + 5 : name, i, uuid);
    }
    return DONE;
}

static int list_gpus(void)
{
    unsigned count, i;
    char uuid[96], name[96];
    int code, result = DONE;
    if (!load())
        return no_driver("there is no libnvidia-ml.so.1");
    if ((code = named("nvmlInit_v2")()) != 0)
        return no_driver("no server answers, or it refuses");
    if ((code = named("nvmlDeviceGetCount_v2")(&count)) != 0)
        return call_failed("the GPUs cannot be counted", code);
    for (i = 0; i < count; i++) {
        void *gpu;
        if ((code = named("nvmlDeviceGetHandleByIndex_v2")(i, &gpu)) != 0 ||
            (code = named("nvmlDeviceGetUUID")(gpu, uuid, (unsigned)sizeof uuid)) != 0 ||
            (code = named("nvmlDeviceGetName")(gpu, name, (unsigned)sizeof name)) != 0) {
            char what[64];
            snprintf(what, sizeof what, "Unable to determine the device handle for GPU %u", i);
            result = call_failed(what, code);
            continue;
        }
        printf("GPU %u: %s (UUID: %s)\n", i, name, uuid);
        if (list_mig_devices(gpu) != DONE)
            result = FAILED;
    }
    named("nvmlShutdown")();
    return result;
}

/* ---- resetting, by control messages */

/* Where the server listens, as the library finds it. */
static void find_server(char *path, size_t size)
{
    const char *given = getenv("MIGD_SIM_SOCKET");
    char root[PATH_MAX - 64];
    if (given != NULL && given[0] != 0) {
        snprintf(path, size, "%s", given);
        return;
    }
    find_root(root, sizeof root);
    snprintf(path, size, "%s/run/migd/nvml.sock", root);
}

/* A connection, or -1. A socket address holds 107 characters: a longer path is reached through its folder. */
static int reach(const char *path)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), folder = -1, result;
    if (fd < 0)
        return -1;
    if (strlen(path) < sizeof to.sun_path) {
        memcpy(to.sun_path, path, strlen(path) + 1);
    } else {
        char copy[PATH_MAX];
        char *slash;
        snprintf(copy, sizeof copy, "%s", path);
        slash = strrchr(copy, '/');
        if (slash != NULL)
            *slash = 0;
        if (slash == NULL || (folder = open(copy, O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0) {
            close(fd);
            return -1;
        }
        snprintf(to.sun_path, sizeof to.sun_path, "/proc/self/fd/%d/%.60s", folder, slash + 1);
    }
    do {
        result = connect(fd, (struct sockaddr *)&to, sizeof to);
    } while (result != 0 && errno == EINTR);
    if (folder >= 0)
        close(folder);
    if (result != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Send a message and read its answer, a JSON text in packets of which the last begins with '.': 1, or 0 where it ends. */
static int ask(int fd, const char *message, char *answer)
{
    size_t length = 0;
    char packet[PACKET_MAX];
    if (send(fd, message, strlen(message), MSG_NOSIGNAL) < 0)
        return 0;
    for (;;) {
        ssize_t got = recv(fd, packet, sizeof packet, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 1 || length + (size_t)got > ANSWER_MAX)
            return 0;
        memcpy(answer + length, packet + 1, (size_t)got - 1);
        length += (size_t)got - 1;
        answer[length] = 0;
        if (packet[0] == '.')
            return 1;
    }
}

/* The text of a field of a JSON object, from where it begins: 1, or 0 where it has none. \u is kept for ASCII only. */
static int field(const char *object, const char *name, char *text, size_t size)
{
    char key[64];
    const char *at;
    size_t length = 0;
    snprintf(key, sizeof key, "\"%s\":\"", name);
    at = strstr(object, key);
    if (at == NULL)
        return 0;
    for (at += strlen(key); *at != 0 && *at != '"' && length + 1 < size; at++) {
        if (*at != '\\') {
            text[length++] = *at;
            continue;
        }
        at++;
        if (*at == 'u') {
            unsigned code = 0;
            if (sscanf(at + 1, "%4x", &code) != 1)
                break;
            at += 4;
            text[length++] = code < 128 ? (char)code : '?';
        } else if (*at != 0) {
            text[length++] = *at == 'n' ? '\n' : *at == 't' ? '\t' : *at;
        }
    }
    text[length] = 0;
    return 1;
}

struct gpu {
    char index[16], uuid[96], bus_id[64];
};

/* The GPUs that the server tells of; how many. */
static size_t read_gpus(const char *answer, struct gpu *gpus)
{
    const char *object = answer;
    size_t count = 0;
    while (count < IDS_MAX && (object = strstr(object, "{\"index\":")) != NULL) {
        object += strlen("{\"index\":");
        snprintf(gpus[count].index, sizeof gpus->index, "%ld", strtol(object, NULL, 10));
        if (field(object, "uuid", gpus[count].uuid, sizeof gpus->uuid) &&
            field(object, "bus_id", gpus[count].bus_id, sizeof gpus->bus_id))
            count++;
    }
    return count;
}

/* Whether an address means this GPU: 00000000:03:00.0 may be written with four digits, or none, of its domain. */
static int is_at(const struct gpu *gpu, const char *id)
{
    size_t length = strlen(id), whole = strlen(gpu->bus_id);
    return length >= 7 && length <= whole && strchr(id, ':') != NULL &&
           strcasecmp(gpu->bus_id + whole - length, id) == 0;
}

static int reset_one(int fd, const struct gpu *gpu, char *answer)
{
    char message[256], text[4096];
    snprintf(message, sizeof message, "{\"do\":\"reset\",\"gpu\":\"%s\"}", gpu->uuid);
    if (!ask(fd, message, answer)) {
        fprintf(stderr, "GPU %s: the server ended meanwhile\n", gpu->bus_id);
        return FAILED;
    }
    if (strncmp(answer, "{\"error\":", 9) == 0) {
        fprintf(stderr, "The following GPUs could not be reset:\n  GPU %s: %s\n", gpu->bus_id,
                field(answer, "message", text, sizeof text) ? text : answer);
        return FAILED;
    }
    printf("GPU %s was successfully reset.\n", gpu->bus_id);
    return DONE;
}

static int reset_gpus(char *ids)
{
    static struct gpu gpus[IDS_MAX];
    static char answer[ANSWER_MAX + 1];
    char path[PATH_MAX];
    char wanted[IDS_MAX] = {0};
    size_t count, i;
    int fd, result = DONE;
    char *id, *rest = NULL;
    find_server(path, sizeof path);
    if ((fd = reach(path)) < 0) {
        char why[PATH_MAX + 64];
        snprintf(why, sizeof why, "no server answers at %s", path);
        return no_driver(why);
    }
    if (!ask(fd, "{\"do\":\"gpus\"}", answer))
        return no_driver("the server ended meanwhile");
    count = read_gpus(answer, gpus);
    if (ids == NULL)
        memset(wanted, 1, count);
    for (id = ids == NULL ? NULL : strtok_r(ids, ",", &rest); id != NULL; id = strtok_r(NULL, ",", &rest)) {
        for (i = 0; i < count; i++)
            if (strcmp(id, gpus[i].index) == 0 || strcasecmp(id, gpus[i].uuid) == 0 || is_at(&gpus[i], id))
                break;
        if (i == count) {
            fprintf(stderr, "No devices were found: there is no GPU %s\n", id);
            return NOT_FOUND; /* nothing is reset then */
        }
        wanted[i] = 1;
    }
    for (i = 0; i < count; i++)
        if (wanted[i] && reset_one(fd, &gpus[i], answer) != DONE)
            result = FAILED;
    close(fd);
    if (result == DONE)
        printf("All done.\n");
    return result;
}

/* ---- the command line */

int main(int count, char **words)
{
    int list = 0, reset = 0, i;
    char *ids = NULL;
    for (i = 1; i < count; i++) {
        char *word = words[i];
        if (strcmp(word, "-h") == 0 || strcmp(word, "--help") == 0) {
            fputs(WHAT, stdout);
            return DONE;
        } else if (strcmp(word, "-L") == 0 || strcmp(word, "--list-gpus") == 0) {
            list = 1;
        } else if (strcmp(word, "-r") == 0 || strcmp(word, "--gpu-reset") == 0) {
            reset = 1;
        } else if ((strcmp(word, "-i") == 0 || strcmp(word, "--id") == 0) && i + 1 < count) {
            ids = words[++i];
        } else if (strncmp(word, "--id=", 5) == 0) {
            ids = word + 5;
        } else if (strncmp(word, "-i=", 3) == 0) {
            ids = word + 3;
        } else {
            fprintf(stderr, "nvidia-smi: %s is not simulated.\n%s", word, WHAT);
            return USAGE;
        }
    }
    if (list + reset != 1 || (list && ids != NULL)) {
        fprintf(stderr, "nvidia-smi: only -L, or -r with or without -i, is simulated.\n%s", WHAT);
        return USAGE;
    }
    return list ? list_gpus() : reset_gpus(ids);
}
