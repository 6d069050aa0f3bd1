#pragma once

#define IMPLEMENT_MODULE(Class, Name)
