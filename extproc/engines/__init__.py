# SPDX-License-Identifier: Apache-2.0
"""What vLLM, SGLang, TensorRT-LLM and Triton call things: metrics, pages, adapter calls and answers; plain structs."""
