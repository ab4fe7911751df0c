"""An inference engine that behaves like vLLM (V1) without a GPU: the model of it is pure, the server a thin shell."""
