# SPDX-License-Identifier: Apache-2.0
"""Names and formats of vLLM, SGLang, TensorRT-LLM and Triton: metrics, pages, adapter calls, answers; plain structs."""
