"""What anybody would write first: the driver's figures in gauges, once a second, by prometheus_client's own server.

Owns nothing but being obvious. Run as `python -m benchmarks.node.peer_baseline PORT` until SIGTERM.
"""

import sys
import time

import pynvml
from prometheus_client import Gauge, start_http_server

_LABELS = ("gpu", "uuid")
UTILIZATION = Gauge("gpu_utilization_percent", "As nvidia-smi shows it.", _LABELS)
MEMORY = Gauge("gpu_memory_used_bytes", "Frame buffer in use.", _LABELS)
POWER = Gauge("gpu_power_watts", "Power draw.", _LABELS)
TEMPERATURE = Gauge("gpu_temperature_celsius", "Of the chip.", _LABELS)
CLOCK = Gauge("gpu_sm_clock_hertz", "SM clock.", _LABELS)


def main() -> None:
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
    names = [(str(n), pynvml.nvmlDeviceGetUUID(handle)) for n, handle in enumerate(handles)]
    start_http_server(int(sys.argv[1]), addr="127.0.0.1")
    while True:
        for handle, name in zip(handles, names, strict=True):
            UTILIZATION.labels(*name).set(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            MEMORY.labels(*name).set(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            POWER.labels(*name).set(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)
            TEMPERATURE.labels(*name).set(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
            CLOCK.labels(*name).set(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM) * 1e6)
        time.sleep(1)


if __name__ == "__main__":
    main()
