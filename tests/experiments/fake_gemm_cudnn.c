/* A stand-in for cuDNN's calls that name an algorithm: descriptors are checked, and the convolution
   is computed by loops, on the host. GEMM (2) refuses NHWC, as cuDNN does. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int kind, format, size[4]; } Desc;
typedef struct { int pad[2], step[2], math, mode; } Conv;
enum { TENSOR = 11, FILTER = 22 };
enum { OK = 0, BAD = 3000, UNSUPPORTED = 9 };

size_t cudnnGetVersion(void) { return 90100; }
int cudnnCreate(void **h) { *h = malloc(8); return OK; }
int cudnnSetStream(void *h, void *s) { (void)h; (void)s; return OK; }
static int made(void **d, int kind) {
  Desc *x = calloc(1, sizeof *x);
  x->kind = kind;
  *d = x;
  return OK;
}
int cudnnCreateTensorDescriptor(void **d) { return made(d, TENSOR); }
int cudnnCreateFilterDescriptor(void **d) { return made(d, FILTER); }
int cudnnCreateConvolutionDescriptor(void **d) { *d = calloc(1, sizeof(Conv)); return OK; }
static int set(Desc *d, int kind, int format, int type, int a, int b, int c, int e) {
  if (d->kind != kind || type != 0) return BAD;
  int size[4] = {a, b, c, e};
  d->format = format;
  memcpy(d->size, size, sizeof size);
  return OK;
}
int cudnnSetTensor4dDescriptor(Desc *d, int f, int t, int a, int b, int c, int e) {
  return set(d, TENSOR, f, t, a, b, c, e);
}
int cudnnSetFilter4dDescriptor(Desc *d, int t, int f, int a, int b, int c, int e) {
  return set(d, FILTER, f, t, a, b, c, e);
}
int cudnnSetConvolution2dDescriptor(Conv *c, int ph, int pw, int u, int v, int dh, int dw, int mode,
                                    int type) {
  if (dh != 1 || dw != 1 || type != 0 || mode != 1) return BAD;
  c->pad[0] = ph, c->pad[1] = pw, c->step[0] = u, c->step[1] = v;
  return OK;
}
int cudnnSetConvolutionMathType(Conv *c, int math) { c->math = math; return math == 3 ? OK : BAD; }
int cudnnGetConvolutionForwardWorkspaceSize(void *h, Desc *x, Desc *w, Conv *c, Desc *y, int algo,
                                            size_t *size) {
  (void)h, (void)w, (void)y;
  if (c->math != 3) return BAD;
  if (algo < 0 || algo > 2 || (algo == 2 && x->format == 1)) return UNSUPPORTED;
  *size = algo == 1 ? 64 : 0;
  return OK;
}
static size_t at(const Desc *d, int a, int b, int h, int w) {
  if (d->format == 0) return (((size_t)a * d->size[1] + b) * d->size[2] + h) * d->size[3] + w;
  return (((size_t)a * d->size[2] + h) * d->size[3] + w) * d->size[1] + b;
}
int cudnnConvolutionForward(void *h, const float *one, Desc *dx, const float *x, Desc *dw,
                            const float *w, Conv *c, int algo, void *space, size_t bytes,
                            const float *zero, Desc *dy, float *y) {
  (void)h;
  if (*one != 1.0f || *zero != 0.0f || dx->size[1] != dw->size[1] || dy->size[1] != dw->size[0])
    return BAD;
  if (algo == 1) {
    if (bytes < 64) return BAD;
    memset(space, 1, 64);
  }
  for (int b = 0; b < dy->size[0]; b++)
    for (int n = 0; n < dy->size[1]; n++)
      for (int i = 0; i < dy->size[2]; i++)
        for (int j = 0; j < dy->size[3]; j++) {
          double sum = 0;
          for (int k = 0; k < dw->size[1]; k++)
            for (int r = 0; r < dw->size[2]; r++)
              for (int s = 0; s < dw->size[3]; s++) {
                int row = i * c->step[0] + r - c->pad[0], column = j * c->step[1] + s - c->pad[1];
                if (row < 0 || column < 0 || row >= dx->size[2] || column >= dx->size[3]) continue;
                sum += (double)x[at(dx, b, k, row, column)] * w[at(dw, n, k, r, s)];
              }
          y[at(dy, b, n, i, j)] = (float)sum;
        }
  return OK;
}
