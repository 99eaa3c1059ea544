"""Our engine on CPUs: folded, fused through oneDNN, form and threads chosen by measurement."""
