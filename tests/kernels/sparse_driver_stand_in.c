// In place of libcuda: says what it is asked in a file, and fails where the environment names the
// call. Kernels are named by their handle.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int answer(const char* call, const char* what) {
  FILE* log = fopen(getenv("NARROWGAUGE_STAND_IN_LOG"), "a");
  fprintf(log, "%s %s\n", call, what);
  fclose(log);
  const char* failing = getenv("NARROWGAUGE_STAND_IN_FAILS");
  return failing && strcmp(failing, call) == 0 ? 209 : 0;
}

int cuGetErrorString(int code, const char** text) {
  *text = code == 209 ? "no kernel image" : NULL;
  return 0;
}

// A thread's context, as the driver keeps it; each device's primary one is its number and 0x20.
static __thread void* current = NULL;

int cuCtxGetCurrent(void** context) {
  *context = current;
  return 0;
}

int cuDeviceGet(int* handle, int ordinal) {
  *handle = ordinal;
  return ordinal > 1 ? 209 : 0;
}

int cuDevicePrimaryCtxRetain(void** context, int handle) {
  char text[20];
  snprintf(text, sizeof text, "%d", handle);
  *context = (char*)0x20 + handle;
  return answer("cuDevicePrimaryCtxRetain", text);
}

int cuCtxSetCurrent(void* context) {
  char text[20];
  current = context;
  snprintf(text, sizeof text, "%p", context);
  return answer("cuCtxSetCurrent", text);
}

int cuModuleLoadData(void** module, const void* image) {
  *module = (void*)0x10;
  return answer("cuModuleLoadData", image);
}

int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = strdup(name);
  return answer("cuModuleGetFunction", module == (void*)0x10 ? name : "no module");
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
  char text[200];
  snprintf(text, sizeof text, "%s %d %d", (char*)function, attribute, value);
  return answer("cuFuncSetAttribute", text);
}

int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void* stream, void** arguments, void** extra) {
  char text[400];
  snprintf(text, sizeof text, "%s %u,%u,%u %u,%u,%u %u %p %p %u %d", (char*)function, x, y, z, bx,
           by, bz, shared, stream, *(void**)arguments[0], *(unsigned*)arguments[1], extra != NULL);
  return answer("cuLaunchKernel", text);
}
