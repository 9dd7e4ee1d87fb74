// What differs between hipBLASLt's versions, in one place, and its record's layout as we assume it.
//
// 0.10 to 0.12 (ROCm 6.3, 6.4) have plain structs and, beside them, classes with the suffix V2; from 1.0
// (ROCm 7.0) the plain names are the classes. Only the classes are used here.
#pragma once

#include <hip/hip_runtime_api.h>
#include <hipblaslt/hipblaslt-ext.hpp>
#include <hipblaslt/hipblaslt-version.h>
#include <hipblaslt/hipblaslt.h>

#include <cstddef>
#include <cstdint>

#include "hipgroupgemm.h"
#include "user_arguments.h"

#if HIPBLASLT_VERSION_MAJOR == 0 && HIPBLASLT_VERSION_MINOR < 10
#error "hipgroupgemm needs hipBLASLt 0.10 (ROCm 6.3) or newer"
#endif

// 1.1 adds a workspace limit that belongs to the instance.
#define HGG_HAS_INSTANCE_WORKSPACE_LIMIT \
    (HIPBLASLT_VERSION_MAJOR > 1 || (HIPBLASLT_VERSION_MAJOR == 1 && HIPBLASLT_VERSION_MINOR >= 1))

namespace hgg {

namespace lt = hipblaslt_ext;

#if HIPBLASLT_VERSION_MAJOR >= 1
using Preference = lt::GemmPreference;
using ProblemType = lt::GemmProblemType;
using Epilogue = lt::GemmEpilogue;
using Inputs = lt::GemmInputs;
#else
using Preference = lt::GemmPreferenceV2;
using ProblemType = lt::GemmProblemTypeV2;
using Epilogue = lt::GemmEpilogueV2;
using Inputs = lt::GemmInputsV2;
#endif

constexpr hgg_version kBuiltFor = {HIPBLASLT_VERSION_MAJOR, HIPBLASLT_VERSION_MINOR, HIPBLASLT_VERSION_PATCH};

// hipBLASLt's own record against the layout that our kernels write (the kernels that read it hard-code it).
using Record = lt::UserArguments;
static_assert(sizeof(Record) == HGG_RECORD_SIZE, "hipBLASLt's device record has another size");
static_assert(sizeof(hgg_user_arguments) == sizeof(Record), "our record has another size than hipBLASLt's");
#define HGG_AT(theirs, ours, offset)                                                                     \
    static_assert(offsetof(Record, theirs) == (offset), "hipBLASLt's device record has another layout"); \
    static_assert(offsetof(hgg_user_arguments, ours) == (offset)                                         \
                      && sizeof(hgg_user_arguments::ours) == sizeof(Record::theirs),                     \
                  "our record has another layout than hipBLASLt's")
HGG_AT(m, m, 0);
HGG_AT(n, n, 4);
HGG_AT(batch, batch, 8);
HGG_AT(k, k, 12);
HGG_AT(d, d, 16);
HGG_AT(c, c, 24);
HGG_AT(a, a, 32);
HGG_AT(b, b, 40);
HGG_AT(strideD1, stride_d1, 48);
HGG_AT(strideD2, stride_d2, 52);
HGG_AT(strideC1, stride_c1, 56);
HGG_AT(strideC2, stride_c2, 60);
HGG_AT(strideA1, stride_a1, 64);
HGG_AT(strideA2, stride_a2, 68);
HGG_AT(strideB1, stride_b1, 72);
HGG_AT(strideB2, stride_b2, 76);
HGG_AT(alpha, alpha, 80);
HGG_AT(beta, beta, 96);
HGG_AT(scaleA, scale_a, 112);
HGG_AT(scaleB, scale_b, 120);
HGG_AT(scaleC, scale_c, 128);
HGG_AT(scaleD, scale_d, 136);
HGG_AT(scaleAlphaVec, scale_alpha_vec, 144);
HGG_AT(bias, bias, 152);
HGG_AT(biasType, bias_type, 160);
HGG_AT(reserved, reserved, 164);
HGG_AT(e, e, 168);
HGG_AT(strideE1, stride_e1, 176);
HGG_AT(strideE2, stride_e2, 180);
HGG_AT(act0, act0, 184);
HGG_AT(act1, act1, 188);
HGG_AT(activationType, activation_type, 192);
#undef HGG_AT
static_assert(sizeof(Record::m) == 4 && sizeof(Record::strideD1) == 4, "sizes and strides are 32-bit");
static_assert(sizeof(Record::alpha) == 16 && sizeof(Record::beta) == 16, "alpha and beta are 16 raw bytes");
static_assert(sizeof(Record::biasType) == 4 && sizeof(Record::activationType) == 4, "codes are 32-bit");

static_assert(int(HGG_R_32F) == int(HIP_R_32F) && int(HGG_R_64F) == int(HIP_R_64F)
                  && int(HGG_R_16F) == int(HIP_R_16F) && int(HGG_R_16BF) == int(HIP_R_16BF),
              "the element types' numbers are hipDataType's");

}  // namespace hgg
