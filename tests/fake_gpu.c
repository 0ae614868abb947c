/* A CUDA driver for machines without a GPU: device memory is host memory, a launch calls back. */
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;
typedef void (*launch_callback)(const char *, const unsigned *, void **);

int capability = 89;
int failing; /* status of the next cuStreamCreate */
static launch_callback on_launch;

void set_launch_callback(launch_callback callback) { on_launch = callback; }

int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = malloc(1); return 0; }
int cuCtxSetCurrent(void *context) { return context == NULL; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10 : -1;
  return 0;
}
int cuGetErrorString(int status, const char **text) { *text = "a fake failure"; return 0; }
int cuMemAlloc_v2(address *out, size_t size) { return posix_memalign((void **)out, 256, size); }
int cuMemFree_v2(address memory) { free((void *)memory); return 0; }
int cuMemsetD8_v2(address memory, unsigned char value, size_t size) { memset((void *)memory, value, size); return 0; }
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t size, void *stream) { memcpy((void *)to, from, size); return 0; }
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t size, void *stream) { memcpy(to, (void *)from, size); return 0; }
int cuMemcpyDtoDAsync_v2(address to, address from, size_t size, void *stream) { memcpy((void *)to, (void *)from, size); return 0; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(1); return failing; }
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
