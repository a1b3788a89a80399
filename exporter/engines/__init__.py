"""Reads the metrics of serving engines (vLLM, SGLang, ...): one module and one row of ENGINES for each."""
