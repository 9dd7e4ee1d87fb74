# make check-hipblaslt: the native part against the real hipBLASLt of Debian's unstable suite. Needs root.
check-hipblaslt:
	tools/check_hipblaslt.sh

.PHONY: check-hipblaslt
