// The part of Unreal Engine that clients/unreal uses, for a console: the same names and signatures, and no engine behind them.
// TCHAR is char here. The macros of the header tool are empty, so that this compiles as C++ alone.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

using int32 = std::int32_t;
using int64 = std::int64_t;
using TCHAR = char;

#define TEXT(text) text
#define TCHAR_TO_UTF8(text) (text)
#define UTF8_TO_TCHAR(text) (text)
#define PLATFORM_WINDOWS 0
#define THIRD_PARTY_INCLUDES_START
#define THIRD_PARTY_INCLUDES_END
#define LUDUS_API

#define UCLASS(...)
#define UPROPERTY(...)
#define UFUNCTION(...)
#define GENERATED_BODY() \
public: \
	using Super = UActorComponent; \
private:

class FString
{
public:
	FString() = default;
	FString(const TCHAR* Text) : Text_(Text) {}
	const TCHAR* operator*() const { return Text_.c_str(); }
	bool IsEmpty() const { return Text_.empty(); }

private:
	std::string Text_;
};

template <typename T>
class TArray
{
public:
	void Add(T Value) { Values_.push_back(Value); }
	void Reset() { Values_.clear(); }
	int32 Num() const { return static_cast<int32>(Values_.size()); }
	T operator[](int32 Index) const { return Values_.at(static_cast<std::size_t>(Index)); }
	typename std::vector<T>::const_iterator begin() const { return Values_.begin(); }
	typename std::vector<T>::const_iterator end() const { return Values_.end(); }

private:
	std::vector<T> Values_;
};

template <typename T>
class TSharedPtr : public std::shared_ptr<T>
{
public:
	using std::shared_ptr<T>::shared_ptr;
	void Reset() { this->reset(); }
};

template <typename T, typename... Arguments>
TSharedPtr<T> MakeShared(Arguments&&... Given)
{
	return TSharedPtr<T>(new T(std::forward<Arguments>(Given)...));
}

#define DEFINE_LOG_CATEGORY_STATIC(Name, Default, Compiled) struct F##Name {}
#define UE_LOG(Category, Verbosity, ...) LogLine(#Verbosity, __VA_ARGS__)

template <typename... Arguments>
void LogLine(const char* Verbosity, const char* Format, Arguments... Given)
{
	if (std::string(Verbosity) == "Warning") std::printf("warning: ");
	if (std::string(Verbosity) == "Error") std::printf("error: ");
	std::printf(Format, Given...);
	std::printf("\n");
}
