"""What DeepEP needs of NVIDIA's management library: every pair of devices has NVLink."""

NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetP2PStatus(one, other, what):
    return NVML_P2P_STATUS_OK
