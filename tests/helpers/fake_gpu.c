/* A CUDA driver for machines without a GPU: device memory is host memory, a launch calls back. */
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;
typedef void (*launch_callback)(const char *, const unsigned *, void **);

int capability = 89;
int failing; /* status of the next cuStreamCreate */
int failing_capture, failing_instance; /* of each cuStreamEndCapture, cuGraphInstantiateWithFlags */
int memory, graphs, streams; /* in use */
static _Thread_local int entered;
static launch_callback on_launch;

/* Work on a stream is done at once; while it is captured, it is kept to be done at each launch of the graph. */
typedef void (*task)(void);
struct work { address to, from; size_t size; task run; };
struct graph { int count; struct work works[1000]; };
struct graph *capturing;
int captures, launches;

static void do_work(struct work w) {
  if (w.run) w.run();
  else memcpy((void *)w.to, (void *)w.from, w.size);
}
static int submit(struct work w) {
  if (capturing) capturing->works[capturing->count++] = w;
  else do_work(w);
  return 0;
}
void submit_task(task run) { submit((struct work){.run = run}); }

int cuStreamBeginCapture_v2(void *stream, int mode) {
  if (mode != 1 || capturing) return 1;
  captures++;
  capturing = calloc(1, sizeof *capturing);
  return 0;
}
int cuStreamEndCapture(void *stream, void **graph) {
  *graph = failing_capture ? NULL : capturing;
  graphs += *graph != NULL;
  capturing = NULL;
  return failing_capture;
}
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
  if (failing_instance) return failing_instance;
  *executable = memcpy(malloc(sizeof(struct graph)), graph, sizeof(struct graph));
  graphs++;
  return flags != 0;
}
int cuGraphDestroy(void *graph) { free(graph); graphs--; return graph == NULL; }
int cuGraphExecDestroy(void *graph) { free(graph); graphs--; return graph == NULL; }
int cuGraphLaunch(void *executable, void *stream) {
  struct graph *graph = executable;
  launches++;
  for (int i = 0; i < graph->count; i++) do_work(graph->works[i]);
  return stream == NULL;
}

void set_launch_callback(launch_callback callback) { on_launch = callback; }

int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = malloc(1); return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuCtxSetCurrent(void *context) { entered = 1; return context == NULL; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : -1;
  return 0;
}
int cuGetErrorString(int status, const char **text) { *text = "a fake failure"; return 0; }
int cuMemAlloc_v2(address *out, size_t size) { memory++; return entered ? posix_memalign((void **)out, 256, size) : 201; }
int cuMemFree_v2(address where) { free((void *)where); memory--; return entered ? 0 : 201; }
int cuMemsetD8_v2(address memory, unsigned char value, size_t size) { memset((void *)memory, value, size); return 0; }
int cuMemsetD8Async(address memory, unsigned char value, size_t size, void *stream) { memset((void *)memory, value, size); return entered ? capturing != NULL : 201; }
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t size, void *stream) { memcpy((void *)to, from, size); return entered ? capturing != NULL : 201; }
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t size, void *stream) { memcpy(to, (void *)from, size); return entered ? capturing != NULL : 201; }
int cuMemcpyDtoDAsync_v2(address to, address from, size_t size, void *stream) { return submit((struct work){to, from, size}); }
int cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(1); streams++; return failing; }
int cuStreamDestroy_v2(void *stream) { free(stream); streams--; return stream == NULL; }
int cuStreamSynchronize(void *stream) { return stream == NULL; }
int cuModuleLoadData(void **module, const void *image) { *module = strdup(image); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = strdup(name);
  return strstr(module, name) == NULL;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
  unsigned sizes[] = {gx, gy, gz, bx, by, bz, shared};
  on_launch(function, sizes, parameters);
  return 0;
}
