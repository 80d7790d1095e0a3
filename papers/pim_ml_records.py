"""Times that the vendor of the cores in memory published, in seconds: for `papers/pim_ml.py`.

K-means: github upmem/dpu_kmeans, benchmarks/strong_scaling/benchmarks.csv. Trees: github upmem/scikit-dpu,
benchmarks/higgs_results.csv and strong_scaling.csv (which, by its script, fixes the points a core). Read there; cores
of 350 MHz. They are not the paper's tables.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class KMeansTimes:
    """fit_s: ten fits from different starts. single_s: one of them. total_s: of the whole script."""

    fit_s: float
    preparation_s: float
    single_s: float
    total_s: float
    kernel_s: float = 0.0  # of one fit
    exchange_s: float = 0.0  # between cores, through the host; of one fit


# 25.6 million synthetic points of 16 numbers, 16 clusters. By cores.
KMEANS_CPU = KMeansTimes(29.406, 6.424, 2.7503, 51.761)
KMEANS = {
    256: KMeansTimes(109.915, 21.418, 10.2513, 148.787, 10.2393, 0.01200),
    512: KMeansTimes(55.269, 21.383, 5.1542, 94.463, 5.1363, 0.01789),
    1024: KMeansTimes(27.749, 21.353, 2.5875, 66.808, 2.5624, 0.02509),
    2040: KMeansTimes(17.491, 21.100, 1.6308, 56.433, 1.5721, 0.05870),
}


@dataclass(frozen=True)
class TreeTimes:
    build_s: float
    total_s: float
    accuracy: float


# Higgs, by cores.
TREES_CPU = TreeTimes(67.415, 68.796, 0.6544)
TREES = {
    100: TreeTimes(14.678, 25.404, 0.6357),
    300: TreeTimes(5.892, 9.740, 0.6530),
    1000: TreeTimes(3.403, 6.338, 0.6535),
    2524: TreeTimes(3.231, 7.133, 0.6689),
}

# Synthetic, 100,000 points of 16 features for each core: (in memory, CPU), by cores.
SCALED_TREES = {
    10: (TreeTimes(8.331, 9.497, 0.7847), TreeTimes(2.123, 2.247, 0.7930)),
    30: (TreeTimes(8.371, 11.258, 0.7702), TreeTimes(8.530, 8.934, 0.7819)),
    100: (TreeTimes(8.428, 14.261, 0.7633), TreeTimes(33.048, 34.488, 0.7841)),
    300: (TreeTimes(8.428, 18.101, 0.7699), TreeTimes(113.964, 118.713, 0.7833)),
    1000: (TreeTimes(8.823, 35.241, 0.7674), TreeTimes(437.248, 453.881, 0.7900)),
    2524: (TreeTimes(9.592, 76.264, 0.7554), TreeTimes(1168.908, 1212.420, 0.7842)),
}
