// The part of UnityEngine that clients/unity uses, for a console: the same names and signatures, and no engine behind them.
using System;
using System.Diagnostics;
using System.Threading;

namespace UnityEngine
{
    [AttributeUsage(AttributeTargets.Field)]
    public sealed class TooltipAttribute : Attribute
    {
        public TooltipAttribute(string tooltip) { }
    }

    [AttributeUsage(AttributeTargets.Field)]
    public sealed class MinAttribute : Attribute
    {
        public MinAttribute(float min) { }
    }

    public class Object
    {
        static readonly Thread Main = Thread.CurrentThread;

        public string name = "agent";

        /// <summary>Like the engine, which serves its main thread only.</summary>
        internal static void CheckThread()
        {
            if (Thread.CurrentThread != Main) throw new InvalidOperationException("can only be called from the main thread");
        }
    }

    public class Transform : Object
    {
        Vector3 _position;
        Quaternion _rotation;
        public Vector3 localPosition { get { return _position; } set { CheckThread(); _position = value; } }
        public Quaternion localRotation { get { return _rotation; } set { CheckThread(); _rotation = value; } }
    }

    public class MonoBehaviour : Object
    {
        public Transform transform = new Transform();
    }

    public struct Vector3
    {
        public float x, y, z;
        public Vector3(float x, float y, float z) { this.x = x; this.y = y; this.z = z; }
    }

    public struct Quaternion
    {
        public static Quaternion Euler(float x, float y, float z) { return new Quaternion(); }
    }

    public static class Mathf
    {
        public const float Rad2Deg = 57.29578f, Deg2Rad = 0.01745329f;
        public static float Sin(float f) { return (float)Math.Sin(f); }
        public static float Cos(float f) { return (float)Math.Cos(f); }
        public static float Abs(float f) { return Math.Abs(f); }
    }

    public static class Time
    {
        static readonly Stopwatch Watch = Stopwatch.StartNew();
        public static float realtimeSinceStartup { get { Object.CheckThread(); return (float)Watch.Elapsed.TotalSeconds; } }
    }

    public static class Debug
    {
        public static void Log(object message) { Write(message.ToString()); }
        public static void LogWarning(object message) { Write("warning: " + message); }

        static void Write(string line)
        {
            Object.CheckThread();
            Console.Out.WriteLine(line);
            Console.Out.Flush();
        }
    }
}
