// Sums of a block of pixels and channels, to where the caller of the operator wants them.
// No torch header.
#pragma once

#include <algorithm>
#include <cstdint>

#include "manual_codes/manual_codes_product.h"
#include "manual_codes/manual_codes_rows.h"

namespace narrowgauge {
namespace codes {

// Channels that are stored at a time: a cache line of sums.
constexpr std::int64_t kStoredChannels = 16;

// `work(pixel, count, out)` for runs of pixels that lie in one image: the next image's do not
// follow. `out` is where the run's first channel begins.
template <typename Work>
void each_run(const Output& out, std::int64_t pixel, std::int64_t count, const Work& work) {
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t run = std::min(count - done, out.area - (pixel + done) % out.area);
    work(done, run, out.pixel(pixel + done));
    done += run;
  }
}

// from[p * stride + c] to pixel `pixel + p` and channel `channel + c`.
inline void store_pixels(const Output& out, std::int64_t pixel, std::int64_t pixels,
                         std::int64_t channel, std::int64_t channels, const std::uint32_t* from,
                         std::int64_t stride, TurnUnits turn) {
  each_run(out, pixel, pixels, [&](std::int64_t first, std::int64_t run, std::int32_t* place) {
    std::uint32_t* const to =
        reinterpret_cast<std::uint32_t*>(place) + channel * out.channel_stride;
    const std::uint32_t* const at = from + first * stride;
    if (out.channel_stride == 1) {
      for (std::int64_t p = 0; p < run; ++p) {
        std::copy_n(at + p * stride, channels, to + p * out.pixel_stride);
      }
      return;
    }
    for (std::int64_t c = 0; c < channels; c += kStoredChannels) {
      turn(at + c, stride, run, std::min(kStoredChannels, channels - c),
                 to + c * out.channel_stride, out.channel_stride);
    }
  });
}

// from[c * stride + p] to pixel `pixel + p` and channel `channel + c`.
inline void store_channels(const Output& out, std::int64_t pixel, std::int64_t pixels,
                           std::int64_t channel, std::int64_t channels, const std::uint32_t* from,
                           std::int64_t stride) {
  each_run(out, pixel, pixels, [&](std::int64_t first, std::int64_t run, std::int32_t* place) {
    std::uint32_t* const to =
        reinterpret_cast<std::uint32_t*>(place) + channel * out.channel_stride;
    for (std::int64_t c = 0; c < channels; ++c) {
      const std::uint32_t* const at = from + c * stride + first;
      for (std::int64_t p = 0; p < run; ++p) {
        to[c * out.channel_stride + p * out.pixel_stride] = at[p];
      }
    }
  });
}

}  // namespace codes
}  // namespace narrowgauge
