// hipBLASLt's grouped GEMM kernels, carried out in plain C++ from the records that a launch points at.
//
// A kernel is known by its name, e.g. Cijk_Ailk_Bljk_HHS_BH_Bias_HA_S_SAV_UserArgs_MT128x16x32_...: Ailk and
// Alik say that A is not, or is, transposed, Bljk and Bjlk the same of B; HHS names input, output and compute
// type; MT is the tile that one work group computes. What a name says that is not known here is refused.
#include "standin.hpp"

#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

namespace standin {
namespace {

constexpr size_t kRecordBytes = 196;

template <class T>
T read(const char* at, size_t offset) {
    T value;
    memcpy(&value, at + offset, sizeof value);
    return value;
}

// ---- element types, by TensileLite's letters: S float32, H float16, B bfloat16

size_t element_size(char type) { return type == 'S' ? 4 : type == 'H' || type == 'B' ? 2 : 0; }

const std::vector<float>& half_values() {
    static const std::vector<float> table = [] {
        std::vector<float> all(65536);
        for (uint32_t bits = 0; bits < 65536; bits++) {
            const auto narrow = static_cast<uint16_t>(bits);
            _Float16 half;
            memcpy(&half, &narrow, 2);
            all[bits] = static_cast<float>(half);
        }
        return all;
    }();
    return table;
}

float load(char type, const void* base, size_t index) {
    if (type == 'S') return static_cast<const float*>(base)[index];
    const uint16_t bits = static_cast<const uint16_t*>(base)[index];
    if (type == 'H') return half_values()[bits];
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

void store(char type, void* base, size_t index, float value) {
    if (type == 'S') {
        static_cast<float*>(base)[index] = value;
    } else if (type == 'H') {
        const _Float16 half = static_cast<_Float16>(value);
        memcpy(static_cast<uint16_t*>(base) + index, &half, 2);
    } else {  // to the nearest, ties to even
        uint32_t bits;
        memcpy(&bits, &value, 4);
        static_cast<uint16_t*>(base)[index] =
            std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

// ---- the kernel's name

struct Kernel {
    bool trans_a, trans_b;
    char input, output;
    uint32_t tile_m, tile_n;
    bool bias, scale_alpha, activation, user_arguments, stream_k;
};

bool has_token(const std::string& name, const char* token) {
    return ("_" + name + "_").find(std::string("_") + token + "_") != std::string::npos;
}

bool parse(const std::string& name, Kernel& k) {
    char a[8], b[8], types[16];
    if (sscanf(name.c_str(), "Cijk_A%4[a-z]_B%4[a-z]_%15[A-Za-z0-9]_", a, b, types) != 3) return false;
    if ((strcmp(a, "ilk") && strcmp(a, "lik")) || (strcmp(b, "ljk") && strcmp(b, "jlk"))) return false;
    if (strlen(types) != 3 || types[2] != 'S' || !element_size(types[0]) || !element_size(types[1]))
        return false;
    const size_t tile = name.find("_MT");
    unsigned tile_m = 0, tile_n = 0;
    if (tile == std::string::npos || sscanf(name.c_str() + tile, "_MT%ux%u", &tile_m, &tile_n) != 2 || !tile_m
        || !tile_n)
        return false;
    const size_t sk = name.find("_SK");
    k = {!strcmp(a, "lik"),
         !strcmp(b, "jlk"),
         types[0],
         types[1],
         tile_m,
         tile_n,
         has_token(name, "Bias"),
         has_token(name, "SAV"),
         name.find("_HA") != std::string::npos,
         has_token(name, "UserArgs"),
         sk != std::string::npos && isdigit(name[sk + 3]) && name[sk + 3] != '0'};
    return true;
}

// ---- one record

struct Matrix {
    const char* address;
    uint64_t leading, batch_stride;
};

struct Record {
    uint32_t m, n, batch, k;
    Matrix d, c, a, b;
    float alpha, beta;
    const char* bias;
    const float* scale_alpha;
    int32_t bias_type, activation;
};

Record read_record(const char* p, const Kernel& kernel) {
    const auto matrix = [&](size_t pointer, size_t strides) {
        return Matrix{read<const char*>(p, pointer), read<uint32_t>(p, strides),
                      read<uint32_t>(p, strides + 4)};
    };
    Record r = {};
    r.m = read<uint32_t>(p, 0);
    r.n = read<uint32_t>(p, 4);
    r.batch = read<uint32_t>(p, 8);
    r.k = read<uint32_t>(p, 12);
    r.d = matrix(16, 48);
    r.c = matrix(24, 56);
    r.a = matrix(32, 64);
    r.b = matrix(40, 72);
    r.alpha = read<float>(p, 80);
    r.beta = read<float>(p, 96);
    if (kernel.scale_alpha) r.scale_alpha = read<const float*>(p, 144);
    if (kernel.bias) {
        r.bias = read<const char*>(p, 152);
        r.bias_type = read<int32_t>(p, 160);
    }
    if (kernel.activation) r.activation = read<int32_t>(p, 192);
    return r;
}

char bias_letter(int32_t code) { return code == 0 ? 'S' : code == 4 ? 'H' : code == 7 ? 'B' : 0; }

// Bytes from a matrix's first element to its last.
size_t span(const Matrix& x, uint64_t rows, uint64_t columns, uint64_t batch, char type) {
    return (rows - 1 + (columns - 1) * x.leading + (batch - 1) * x.batch_stride + 1) * element_size(type);
}

hipError_t multiply(const Kernel& kernel, const Record& r) {
    if (!r.m || !r.n || !r.batch) return hipSuccess;
    if (r.activation) return refuse(hipErrorNotSupported, "activation %d", r.activation);
    const bool product = r.k && r.alpha != 0;
    const size_t m = r.m, n = r.n, k = product ? r.k : 0;
    const char *a = nullptr, *b = nullptr, *c = nullptr, *bias = nullptr;
    if (product) {
        a = kernel_array(r.a.address,
                         span(r.a, kernel.trans_a ? k : m, kernel.trans_a ? m : k, r.batch, kernel.input),
                         "A");
        b = kernel_array(r.b.address,
                         span(r.b, kernel.trans_b ? n : k, kernel.trans_b ? k : n, r.batch, kernel.input),
                         "B");
        if (!a || !b) return hipErrorIllegalAddress;
    }
    if (r.beta != 0) {  // C is not read otherwise
        c = kernel_array(r.c.address, span(r.c, m, n, r.batch, kernel.output), "C");
        if (!c) return hipErrorIllegalAddress;
    }
    char* d = const_cast<char*>(kernel_array(r.d.address, span(r.d, m, n, r.batch, kernel.output), "D"));
    if (!d) return hipErrorIllegalAddress;
    const char bias_type = bias_letter(r.bias_type);
    if (r.bias) {
        if (!bias_type) return refuse(hipErrorNotSupported, "bias type %d", r.bias_type);
        bias = kernel_array(r.bias, m * element_size(bias_type), "bias");
        if (!bias) return hipErrorIllegalAddress;
    }
    const float* scale = nullptr;
    if (r.scale_alpha) {
        scale = kernel_array(r.scale_alpha, m, "scaleAlphaVec");
        if (!scale) return hipErrorIllegalAddress;
    }
    std::vector<float> wide_a(m * k), sum(m);
    for (uint64_t batch = 0; batch < r.batch; batch++) {
        for (size_t l = 0; l < k; l++)
            for (size_t i = 0; i < m; i++)
                wide_a[l * m + i] = load(kernel.input, a,
                                         (kernel.trans_a ? l + i * r.a.leading : i + l * r.a.leading)
                                             + batch * r.a.batch_stride);
        for (size_t j = 0; j < n; j++) {
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (size_t l = 0; l < k; l++) {
                const float factor = load(kernel.input, b,
                                          (kernel.trans_b ? j + l * r.b.leading : l + j * r.b.leading)
                                              + batch * r.b.batch_stride);
                const float* column = &wide_a[l * m];
                for (size_t i = 0; i < m; i++) sum[i] += column[i] * factor;
            }
            for (size_t i = 0; i < m; i++) {
                float value = r.alpha * sum[i];
                if (scale) value *= scale[i];
                if (c)
                    value += r.beta * load(kernel.output, c, i + j * r.c.leading + batch * r.c.batch_stride);
                if (bias) value += load(bias_type, bias, i);
                store(kernel.output, d, i + j * r.d.leading + batch * r.d.batch_stride, value);
            }
        }
    }
    return hipSuccess;
}

void dump(const char* bytes, size_t size) {
    for (size_t at = 0; at + 4 <= size; at += 4)
        log(3, "  argument byte %3zu: %08x", at, read<uint32_t>(bytes, at));
}

}  // namespace

bool is_gemm(const std::string& name) {
    Kernel kernel;
    return parse(name, kernel);
}

// The kernel's arguments, 40 bytes: 0 u32 count | kind << 30; 4 u32 whose low 14 bits are the split of k; 8
// u32; 12 u32 work groups; 16 records; 24 synchroniser; 32 workspace. Kind 2 means records of the user.
hipError_t run_gemm(const Launch& launch) {
    Kernel kernel;
    if (!parse(launch.kernel, kernel))
        return refuse(hipErrorNotSupported, "kernel %s", launch.kernel.c_str());
    if (!kernel.user_arguments || kernel.stream_k)
        return refuse(hipErrorNotSupported, "kernel of this kind: %s", launch.kernel.c_str());
    if (!launch.arguments || launch.argument_bytes < 40)
        return refuse(hipErrorNotSupported, "%zu bytes of arguments for %s", launch.argument_bytes,
                      launch.kernel.c_str());
    if (log_level() >= 3) dump(launch.arguments, launch.argument_bytes);
    const uint32_t head = read<uint32_t>(launch.arguments, 0), count = head & 0x3fffffff, kind = head >> 30;
    const uint32_t split = read<uint32_t>(launch.arguments, 4) & 0x3fff;
    const uint64_t groups = read<uint32_t>(launch.arguments, 12);
    if (kind != 2)
        return refuse(hipErrorNotSupported, "arguments of kind %u (only device records, 2, are carried out)",
                      kind);
    if (split > 1) return refuse(hipErrorNotSupported, "a split of k into %u", split);
    if (groups != launch.grid[0] || launch.grid[1] != 1 || launch.grid[2] != 1)
        return refuse(hipErrorNotSupported, "%lu work groups in a grid of %u x %u x %u", groups,
                      launch.grid[0], launch.grid[1], launch.grid[2]);
    const char* records =
        kernel_array(read<const char*>(launch.arguments, 16), count * kRecordBytes, "records");
    if (!records) return hipErrorIllegalAddress;
    uint64_t tiles = 0;
    for (uint32_t i = 0; i < count; i++) {
        const Record r = read_record(records + i * kRecordBytes, kernel);
        const uint64_t rows = (r.m + uint64_t(kernel.tile_m) - 1) / kernel.tile_m;
        const uint64_t columns = (r.n + uint64_t(kernel.tile_n) - 1) / kernel.tile_n;
        tiles += rows * columns * r.batch;
        if (tiles > groups) {  // a real grid ends there too, and nobody is told
            log(0, "record %u needs work groups up to %lu, the grid has %lu: its output stays unwritten", i,
                tiles, groups);
            continue;
        }
        const hipError_t error = multiply(kernel, r);
        if (error != hipSuccess) return error;
    }
    return hipSuccess;
}

}  // namespace standin
