#include "selftest.h"
void nccl_case(const std::string&, int) {}
